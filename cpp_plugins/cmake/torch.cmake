# The torch operators. Paths come from torch's files: its CMake package requires a whole CUDA development environment,
# of which nothing is needed here. torch is not imported, which would need the CUDA libraries that it runs with.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/find_torch.py
  OUTPUT_VARIABLE ddtree_torch RESULT_VARIABLE ddtree_torch_missing)
if(ddtree_torch_missing)
  message(FATAL_ERROR "DDTREE_TORCH=ON, but ${Python_EXECUTABLE} has no torch: give -DPython_EXECUTABLE=...")
endif()
list(GET ddtree_torch 0 ddtree_torch_root)
list(GET ddtree_torch 1 ddtree_torch_cuda)

function(ddtree_torch_library name kernels)
  add_library(${name} SHARED torch/ops.cpp)
  set_target_properties(${name} PROPERTIES CXX_STANDARD 20)
  target_compile_options(${name} PRIVATE -Wall -Wextra)
  target_include_directories(${name} SYSTEM PRIVATE
      ${ddtree_torch_root}/include ${ddtree_torch_root}/include/torch/csrc/api/include)
  target_link_directories(${name} PRIVATE ${ddtree_torch_root}/lib)
  # No rpath: Python has torch loaded before it loads these operators.
  target_link_libraries(${name} PRIVATE ${kernels} torch_cpu c10 ${ARGN})
  target_link_options(${name} PRIVATE -Wl,--exclude-libs,ALL)
endfunction()

if(DDTREE_CUDA)
  if(ddtree_torch_cuda STREQUAL "none")
    message(FATAL_ERROR "DDTREE_TORCH=ON with DDTREE_CUDA=ON needs a CUDA build of torch; ${ddtree_torch_root} is a CPU build")
  endif()
  find_package(CUDAToolkit REQUIRED)
  ddtree_torch_library(ddtree_torch ddtree_cuda c10_cuda)
  target_include_directories(ddtree_torch SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
endif()
if(DDTREE_EMULATOR)
  ddtree_torch_library(ddtree_emulated_torch ddtree_emulated_kernels)
  target_compile_definitions(ddtree_emulated_torch PRIVATE DDTREE_EMULATE)
endif()
