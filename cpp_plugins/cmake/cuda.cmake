# The CUDA kernels: an object library for the bindings and libddtree_kernels.so, the C interface ctypes loads.
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

add_library(ddtree_kernels SHARED kernels/c_api.cpp)
target_link_libraries(ddtree_kernels PRIVATE ddtree_cuda)
# Static cudart and libstdc++ must not leak symbols that another library could bind to.
target_link_options(ddtree_kernels PRIVATE -Wl,--exclude-libs,ALL -Wl,--no-undefined)
