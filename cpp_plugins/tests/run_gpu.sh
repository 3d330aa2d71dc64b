#!/usr/bin/env bash
# Builds and checks everything of cpp_plugins/ on a GPU machine with nvcc 13, g++ and PyTorch; no TensorRT, no
# CMake, no network. Meant to take well under 8 minutes.
#
#   cpp_plugins/tests/run_gpu.sh [FOLDER]     results as JSON and logs in FOLDER (default $OUT, else build/gpu)
#
# DDTREE_TRT_INCLUDE_DIR  TensorRT headers (default build/tensorrt/include); without them enqueue is not checked
# PYTHON                  interpreter with torch and numpy (default python3)
# Exits 0 when every check that could run passed.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(mkdir -p "${1:-${OUT:-build/gpu}}" && cd "${1:-${OUT:-build/gpu}}" && pwd)
python=${PYTHON:-python3}
headers=${DDTREE_TRT_INCLUDE_DIR:-build/tensorrt/include}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. cpp_plugins/tests/gpu_build.sh
began=$SECONDS
failed=0
declare -A verdict

note() { # name outcome
  verdict[$1]=$2
  echo "[$((SECONDS - began)) s] $1: $2"
  case $2 in failed*) failed=1 ;; esac
}
step() { # name seconds command...: runs a program, or a function of this script in a shell of its own, logged
  local name=$1 limit=$2 status=0
  shift 2
  if [ "$(type -t "$1")" = function ]; then
    set -- bash -euo pipefail -c "$(declare -f "$1" build_kernels build_host_tree); $1"
  fi
  timeout "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
  if [ "$status" = 0 ]; then note "$name" ok; return 0; fi
  note "$name" "failed (exit $status, see $name.log)"
  tail -25 "$out/$name.log"
  return 1
}
finish() {
  {
    echo '{'
    for name in "${!verdict[@]}"; do printf ' "%s": "%s",\n' "$name" "${verdict[$name]//\"/}"; done
    printf ' "seconds": %d\n}\n' $((SECONDS - began))
  } >"$out/summary.json"
  cat "$out/summary.json"
  exit "$failed"
}

if ! gpu_toolchain; then
  note build "failed (needs nvcc and an NVIDIA GPU)"
  finish
fi
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader >"$out/gpu.txt"
"$nvcc" --version | tail -2 >>"$out/gpu.txt"

export headers

build() {
  build_kernels
  build_host_tree
}
step build 240 build || finish

build_harness() {
  local with_trt=()
  if [ -f "$headers/NvInferRuntime.h" ]; then
    with_trt=(-DDDTREE_WITH_TRT -isystem "$headers")
    g++ -std=c++17 -O2 -fPIC -shared -fvisibility=hidden -I$src/include -I$src/trt -isystem "$headers" \
      -isystem "$cuda/include" $src/trt/*.cpp "$work"/*.o -L"$cuda/lib64" -lcudart_static -lpthread -ldl -lrt \
      -Wl,--exclude-libs,ALL -Wl,--version-script=$src/trt/exports.map -o "$work/libddtree_plugins.so"
  fi
  g++ -std=c++17 -O2 "${with_trt[@]}" -I$src/include -isystem "$cuda/include" $src/tests/gpu_harness.cpp "$work"/*.o \
    -L"$cuda/lib64" -lcudart_static -lpthread -ldl -lrt -o "$work/gpu_harness"
}
if step build_harness 120 build_harness; then
  step harness_kernels 60 "$work/gpu_harness" kernels
  if [ -f "$work/libddtree_plugins.so" ]; then
    step enqueue_under_capture 60 "$work/gpu_harness" plugins "$work/libddtree_plugins.so"
  else
    note enqueue_under_capture "skipped: no TensorRT headers"
  fi
  sanitizer=$(command -v compute-sanitizer || ls "$cuda/bin/compute-sanitizer" 2>/dev/null)
  for tool in memcheck racecheck synccheck; do
    if [ -z "$sanitizer" ]; then
      note "sanitizer_$tool" "skipped: no compute-sanitizer"
    else
      step "sanitizer_$tool" 75 "$sanitizer" --tool "$tool" --error-exitcode 9 "$work/gpu_harness" kernels
    fi
  done
fi

if step build_torch 180 build_torch; then
  step check 240 "$python" -m tools.gpu.kernel_check "$work/libddtree_torch.so" "$work/libhost_tree.so" "$out/check.json"
fi
finish
