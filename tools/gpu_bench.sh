#!/usr/bin/env bash
# Everything about the PyTorch engine that only a GPU can show, in ten minutes, on a machine with nvcc 13, g++, PyTorch,
# NumPy and safetensors; no network.
#
#   tools/gpu_bench.sh [--dry-run] [FOLDER]     results as JSON and logs in FOLDER (default $OUT, else build/gpu-bench)
#
# PYTHON      interpreter with torch (default python3)
# WHEELS      folder of wheels to install what that interpreter lacks, without a network
# ARGUMENTS   more for tools/gpu/bench.py, as in "--random-weights qwen3-4b"
#
# --dry-run checks the script on a CPU with tiny shapes: nothing is compiled and no figure means anything.
set -uo pipefail
cd "$(dirname "$0")/.."
mode=()
if [ "${1:-}" = --dry-run ]; then mode=(--dry-run); shift; fi
out=$(mkdir -p "${1:-${OUT:-build/gpu-bench}}" && cd "${1:-${OUT:-build/gpu-bench}}" && pwd)
python=${PYTHON:-python3}

if [ -n "${WHEELS:-}" ]; then
  "$python" -m pip install --quiet --no-index --find-links "$WHEELS" numpy safetensors nanobind || exit 1
fi

build_native() { # the host's C++, for an interpreter that this package is not installed in
  local nanobind headers suffix
  nanobind=$("$python" -c "import os, nanobind; print(os.path.dirname(nanobind.__file__))")
  headers=$("$python" -c "import sysconfig; print(sysconfig.get_path('include'))")
  suffix=$("$python" -c "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))")
  g++ -std=c++17 -O2 -fPIC -shared -fvisibility=hidden -fno-strict-aliasing -DNDEBUG \
    -DDDTREE_STUB="\"$(sha256sum ddtree_trt/_native.pyi | cut -d' ' -f1)\"" -Icpp_plugins/include \
    -I"$nanobind/include" -I"$nanobind/ext/robin_map/include" -I"$headers" \
    cpp_plugins/host/*.cpp "$nanobind/src/nb_combined.cpp" -o "ddtree_trt/_native$suffix"
}

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if ! "$python" -c "import ddtree_trt._native" 2>/dev/null; then
  echo "building the host's C++"
  (set -e; build_native) >"$out/build_native.log" 2>&1 || { cat "$out/build_native.log"; exit 1; }
fi
if [ ${#mode[@]} = 0 ]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  . cpp_plugins/tests/gpu_build.sh
  gpu_toolchain || { echo "needs nvcc and an NVIDIA GPU; --dry-run does without"; exit 1; }
  echo "building the kernels for $arch"
  (set -e; build_kernels; build_host_tree; build_torch) >"$out/build_kernels.log" 2>&1 || { tail -40 "$out/build_kernels.log"; exit 1; }
  cp "$work/libddtree_torch.so" ddtree_trt/plugins/
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv,noheader >"$out/gpu.txt"
  echo "checking the kernels"
  timeout 150 "$python" -m tools.gpu.kernel_check "$work/libddtree_torch.so" "$work/libhost_tree.so" \
    "$out/kernels.json" >"$out/kernels.log" 2>&1 || tail -20 "$out/kernels.log"
  mode=(--kernel-check "$out/kernels.json")
fi
"$python" -m tools.gpu.bench "$out/gpu_bench.json" "${mode[@]}" ${ARGUMENTS:-}
