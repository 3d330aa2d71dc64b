#!/usr/bin/env bash
# Builds what this machine can of the native libraries into ddtree_trt/plugins/, and says what it left out and why.
#
# PYTHON                  interpreter whose torch the operators are built for (default python3)
# DDTREE_TRT_INCLUDE_DIR  TensorRT 11 headers (default build/tensorrt/include)
# DDTREE_CUDA_ARCHS       for instance "90" for one GPU; default: sm_80, 86, 89, 90 and PTX
# CUDACXX                 nvcc; default: PATH, then /usr/local/cuda*
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/plugins
python=${PYTHON:-python3}
headers=${DDTREE_TRT_INCLUDE_DIR:-build/tensorrt/include}
nvcc=${CUDACXX:-$(command -v nvcc || ls -d /usr/local/cuda*/bin/nvcc 2>/dev/null | sort -V | tail -1 || true)}

mkdir -p "$(dirname "$build")"
built=() left_out=()
options=(-DDDTREE_HOST=OFF "-DPython_EXECUTABLE=$(command -v "$python")")

if ! command -v cmake >/dev/null; then
  left_out+=("everything: no cmake")
elif [ -z "$nvcc" ]; then
  left_out+=("libddtree_plugins.so, libddtree_torch.so: no nvcc (CUDA toolkit 13)")
else
  options+=(-DDDTREE_CUDA=ON "-DCMAKE_CUDA_COMPILER=$nvcc")
  [ -z "${DDTREE_CUDA_ARCHS:-}" ] || options+=("-DCMAKE_CUDA_ARCHITECTURES=$DDTREE_CUDA_ARCHS")
  if [ -f "$headers/NvInferRuntime.h" ]; then
    options+=("-DDDTREE_TRT_INCLUDE_DIR=$(cd "$headers" && pwd)")
    built+=(libddtree_plugins.so)
  else
    options+=(-DDDTREE_TRT_INCLUDE_DIR=)
    left_out+=("libddtree_plugins.so: no TensorRT headers in $headers (cpp_plugins/README.md says how to have them)")
  fi
  torch=$("$python" cpp_plugins/cmake/find_torch.py || echo missing)
  case ${torch##*;} in
    missing) options+=(-DDDTREE_TORCH=OFF); left_out+=("libddtree_torch.so: $python has no torch") ;;
    none) options+=(-DDDTREE_TORCH=OFF); left_out+=("libddtree_torch.so: the torch of $python is a CPU build") ;;
    *) options+=(-DDDTREE_TORCH=ON); built+=(libddtree_torch.so) ;;
  esac
  if [ ${#built[@]} -gt 0 ]; then
    cmake -S cpp_plugins -B "$build" "${options[@]}" >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
    cmake --build "$build"
  fi
  for library in "${built[@]}"; do
    cp "$build/$library" ddtree_trt/plugins/
  done
fi

for library in "${built[@]}"; do echo "built    ddtree_trt/plugins/$library"; done
for what in "${left_out[@]}"; do echo "left out $what"; done
