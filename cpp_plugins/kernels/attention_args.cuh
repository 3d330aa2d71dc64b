// What the two kernels of tree attention are launched with.
#pragma once

#include "common.cuh"
#include "ddtree/attention.h"

namespace ddtree {

namespace {

// How a call is cut into blocks. A block has row_warps * key_warps warps: each owns 16 rows and 64 / key_warps keys of
// every tile.
struct Plan {
    int32_t row_warps;
    int32_t key_warps;
    int32_t rows;       // T * group
    int32_t row_tiles;
    int32_t splits;
};

struct AttentionArgs {
    TreeAttention call;
    Plan plan;
    float scale_log2;
    float* partial_out;  // [N, Hkv, splits, rows, D], not yet divided by its sum
    float* partial_sum;  // [N, Hkv, splits, rows, 2]: largest score in units of log2, sum of exponentials
};

}  // namespace

}  // namespace ddtree
