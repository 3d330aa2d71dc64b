// The kernels' own source, compiled for the CPU.
#include "../kernels/kv_compact.cu"
#include "../kernels/pointwise.cu"
#include "../kernels/tree_attention.cu"
#include "../kernels/tree_build.cu"
#include "../kernels/tree_walk.cu"
