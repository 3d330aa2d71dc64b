# The host part, bound with nanobind as ddtree_trt._native.
# Framework-free host code. No -march flag: wheels must run on every CPU of their platform.
add_library(ddtree_host STATIC host/budget.cpp host/sampling.cpp host/draw.cpp host/candidates.cpp host/tree.cpp)
target_include_directories(ddtree_host PUBLIC include)
# Attention, delta nets and products on the CPU, once for each instruction set; the best is chosen when it runs. Without contraction, so that every
# fused multiply-add is a written one and a row has the same bits however it is computed. The plain version is the first:
# of inline functions that several have the linker takes that one's, which every CPU runs.
set(ddtree_attention host/attention/attention.cpp host/attention/operator.cpp host/attention/plain.cpp
    host/delta/operator.cpp host/product/operator.cpp)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND ddtree_attention host/attention/avx2.cpp host/attention/avx512.cpp host/attention/avx512_vnni.cpp
       host/attention/avx512_bf16.cpp)
  set(wide -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma)
  set_source_files_properties(host/attention/avx2.cpp PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma")
  set_source_files_properties(host/attention/avx512.cpp PROPERTIES COMPILE_OPTIONS "${wide}")
  list(APPEND wide -mavx512vnni)
  set_source_files_properties(host/attention/avx512_vnni.cpp PROPERTIES COMPILE_OPTIONS "${wide}")
  set_source_files_properties(host/attention/avx512_bf16.cpp PROPERTIES COMPILE_OPTIONS "${wide};-mavx512bf16")
  set_source_files_properties(host/attention/attention.cpp PROPERTIES COMPILE_DEFINITIONS DDTREE_X86)
endif()
add_library(ddtree_attention OBJECT ${ddtree_attention})
target_include_directories(ddtree_attention PRIVATE include host)
target_compile_options(ddtree_attention PRIVATE -O3 -ffp-contract=off -fno-math-errno -Wall -Wextra)
if(NOT MSVC)
  target_compile_options(ddtree_host PRIVATE -Wall -Wextra)
endif()

# SKBUILD_SABI_COMPONENT: Python's stable interface, of builds for Python 3.12 and later; see wheel.py-api in pyproject.toml.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module ${SKBUILD_SABI_COMPONENT})
if(NOT nanobind_DIR)
  # Outside scikit-build-core (plain `cmake -S cpp_plugins`) the installed package says where it is.
  execute_process(
    COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
    OUTPUT_STRIP_TRAILING_WHITESPACE
    OUTPUT_VARIABLE nanobind_DIR)
endif()
find_package(nanobind CONFIG REQUIRED)

# -O3 also for the binding: NOMINSIZE stops nanobind from choosing -Os. Before Python 3.12 STABLE_ABI has no effect.
nanobind_add_module(_native STABLE_ABI NB_STATIC NOMINSIZE
  host/module.cpp host/tree_module.cpp $<TARGET_OBJECTS:ddtree_attention>)
target_link_libraries(_native PRIVATE ddtree_host)
# What the package expects of the module; one that was built for another state of it is refused when it is imported.
set(stub ${PROJECT_SOURCE_DIR}/../ddtree_trt/_native.pyi)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${stub})
file(SHA256 ${stub} stub_digest)
target_compile_definitions(_native PRIVATE DDTREE_STUB="${stub_digest}")
install(TARGETS _native LIBRARY DESTINATION ddtree_trt)

# Package data that lives outside the package: importlib.resources.files("ddtree_trt") / "triton_repo" finds it in a wheel
# and in an editable install alike.
install(DIRECTORY ${PROJECT_SOURCE_DIR}/../triton_repo DESTINATION ddtree_trt OPTIONAL PATTERN __pycache__ EXCLUDE)
