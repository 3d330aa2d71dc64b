# The CUDA kernels, for the bindings.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  # Code for Ampere to Hopper, and Hopper's PTX for later GPUs.
  set(CMAKE_CUDA_ARCHITECTURES 80-real 86-real 89-real 90)
endif()
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)

list(TRANSFORM ddtree_kernel_sources PREPEND kernels/ OUTPUT_VARIABLE ddtree_cuda_sources)
add_library(ddtree_cuda STATIC ${ddtree_cuda_sources})
target_include_directories(ddtree_cuda PUBLIC include PRIVATE kernels)
target_compile_options(ddtree_cuda PRIVATE -Xcompiler=-Wall,-Wextra)
