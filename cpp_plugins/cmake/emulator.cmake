# The kernels' own source on the CPU, behind a C interface for ctypes: one C++ file that includes each.
list(TRANSFORM ddtree_kernel_sources REPLACE "(.+)" "#include \"\\1\"" OUTPUT_VARIABLE ddtree_kernel_includes)
list(JOIN ddtree_kernel_includes "\n" ddtree_kernel_includes)
file(GENERATE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/emulated_kernels.cpp CONTENT "${ddtree_kernel_includes}\n")
add_library(ddtree_emulated_kernels STATIC emulator/emulator.cpp ${CMAKE_CURRENT_BINARY_DIR}/emulated_kernels.cpp)
target_include_directories(ddtree_emulated_kernels PUBLIC include PRIVATE kernels)
# longjmp between stacks looks like corruption to the fortified one.
target_compile_options(ddtree_emulated_kernels PRIVATE -O2 -U_FORTIFY_SOURCE -Wall -Wextra)
target_compile_definitions(ddtree_emulated_kernels PRIVATE DDTREE_EMULATE)

add_library(ddtree_emulated SHARED emulator/c_api.cpp)
target_link_libraries(ddtree_emulated PRIVATE ddtree_emulated_kernels)
target_link_options(ddtree_emulated PRIVATE -Wl,--exclude-libs,ALL)
