#!/usr/bin/env bash
# Builds the wheel ddtree-trt-cuda13 into dist/. No GPU is needed.
#
# PYTHON                  interpreter with pip, scikit-build-core, auditwheel, and a CUDA build of torch, of which only the
#                         files are used: `pip install --no-deps torch==2.13.0` is enough (default python3)
# DDTREE_TRT_INCLUDE_DIR  TensorRT 11 headers (default build/tensorrt/include)
# DDTREE_CUDA_ARCHS       as for cpp_plugins/build_plugins.sh
# CUDACXX                 nvcc of CUDA 13; default: PATH
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
headers=${DDTREE_TRT_INCLUDE_DIR:-build/tensorrt/include}

if [ ! -f "$headers/NvInferRuntime.h" ]; then
  echo "no TensorRT headers in $headers (cpp_plugins/README.md says how to have them)" >&2
  exit 1
fi
export DDTREE_TRT_INCLUDE_DIR
DDTREE_TRT_INCLUDE_DIR=$(cd "$headers" && pwd)
mkdir -p build dist
rm -rf build/wheel-cuda13
"$python" -m pip wheel --no-deps --no-build-isolation --wheel-dir build/wheel-cuda13 ./cpp_plugins/wheel
# Names the oldest glibc that will do. torch's own libraries are loaded by Python before the operators are.
"$python" -m auditwheel repair --only-plat --exclude 'libtorch*.so*' --exclude 'libc10*.so*' --wheel-dir dist build/wheel-cuda13/*.whl
