# Sourced by run_gpu.sh and tools/gpu_bench.sh, from the repository root: the kernels and the torch operators compiled
# for the present GPU, with nvcc and g++ alone. $python and $work must be set.
src=cpp_plugins
nvcc=$(command -v nvcc || ls -d /usr/local/cuda*/bin/nvcc 2>/dev/null | sort -V | tail -1)

gpu_toolchain() { # sets cuda and arch; fails where nvcc or the GPU is missing
  [ -n "$nvcc" ] && command -v nvidia-smi >/dev/null || return 1
  # nvcc on PATH may be a wrapper far from its toolkit: the compiler itself says where that is.
  cuda=$(realpath "$("$nvcc" --dryrun -c none.cu 2>&1 | sed -n 's/^#\$ TOP=//p')")
  arch=sm_$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
  export python work nvcc cuda arch src
}

build_kernels() {
  local pids=() pid
  while read -r file || [ -n "$file" ]; do # the last line may lack its end
    "$nvcc" -std=c++17 -O3 -arch="$arch" -lineinfo -Xptxas -v -Xcompiler -fPIC,-fvisibility=hidden \
      -I$src/include -I$src/kernels -c "$src/kernels/$file" -o "$work/${file%.cu}.o" &
    pids+=($!)
  done <$src/kernels/sources.txt
  for pid in "${pids[@]}"; do wait "$pid"; done
}

build_host_tree() { # what the kernels' trees and walks are compared with
  g++ -std=c++17 -O2 -fPIC -shared -I$src/include $src/tests/host_tree.cpp $src/host/candidates.cpp $src/host/tree.cpp \
    -o "$work/libhost_tree.so"
}

build_torch() {
  local root
  root=$("$python" -c "import os, torch; print(os.path.dirname(torch.__file__))")
  g++ -std=c++20 -O2 -fPIC -shared -fvisibility=hidden -I$src/include -isystem "$root/include" \
    -isystem "$root/include/torch/csrc/api/include" -isystem "$cuda/include" $src/torch/ops.cpp "$work"/*.o \
    -L"$root/lib" -ltorch_cpu -lc10 -lc10_cuda -L"$cuda/lib64" -lcudart_static -lpthread -ldl -lrt \
    -Wl,--exclude-libs,ALL -o "$work/libddtree_torch.so"
}
