# The TensorRT plugins. Headers only: nothing of TensorRT is linked, its registry loads the library.
if(NOT DDTREE_TRT_INCLUDE_DIR)
  include(FetchContent)
  FetchContent_Declare(tensorrt_headers GIT_REPOSITORY https://github.com/NVIDIA/TensorRT.git
                       GIT_TAG release/11.1 GIT_SHALLOW ON GIT_SUBMODULES "" SOURCE_SUBDIR include)
  FetchContent_MakeAvailable(tensorrt_headers)
  set(DDTREE_TRT_INCLUDE_DIR ${tensorrt_headers_SOURCE_DIR}/include)
endif()
if(NOT EXISTS ${DDTREE_TRT_INCLUDE_DIR}/NvInferRuntime.h)
  message(FATAL_ERROR "DDTREE_TRT_INCLUDE_DIR=${DDTREE_TRT_INCLUDE_DIR} has no NvInferRuntime.h: give the folder include/ "
                      "of the public repository NVIDIA/TensorRT, version 11")
endif()

if(DDTREE_CUDA_INCLUDE_DIR)
  set(ddtree_cuda_headers ${DDTREE_CUDA_INCLUDE_DIR})
else()
  find_package(CUDAToolkit REQUIRED)
  set(ddtree_cuda_headers ${CUDAToolkit_INCLUDE_DIRS})
endif()

add_library(ddtree_glue OBJECT trt/plugin.cpp trt/attention_plugin.cpp trt/compact_plugin.cpp)
target_include_directories(ddtree_glue PUBLIC include trt)
target_include_directories(ddtree_glue SYSTEM PUBLIC ${DDTREE_TRT_INCLUDE_DIR} ${ddtree_cuda_headers})
target_compile_options(ddtree_glue PRIVATE -Wall -Wextra)

# One plugin library on each implementation of the kernels: the product, and one that runs without a GPU, for tests.
function(ddtree_plugin_library name kernels)
  add_library(${name} SHARED trt/entry.cpp)
  target_link_libraries(${name} PRIVATE ddtree_glue ${kernels})
  target_link_options(${name} PRIVATE -Wl,--exclude-libs,ALL -Wl,--no-undefined
                      -Wl,--version-script=${PROJECT_SOURCE_DIR}/trt/exports.map)
  set_target_properties(${name} PROPERTIES LINK_DEPENDS ${PROJECT_SOURCE_DIR}/trt/exports.map)
endfunction()

if(DDTREE_CUDA)
  ddtree_plugin_library(ddtree_plugins ddtree_cuda)
endif()
if(DDTREE_EMULATOR)
  ddtree_plugin_library(ddtree_emulated_plugins ddtree_emulated_kernels)
  foreach(name glue_test glue_workspace_test)
    add_executable(ddtree_${name} tests/${name}.cpp)
    target_link_libraries(ddtree_${name} PRIVATE ddtree_glue ddtree_emulated_kernels)
    target_compile_options(ddtree_${name} PRIVATE -Wall -Wextra -Wno-unused-function)
  endforeach()
endif()
