// Arguments of the two kernels of tree attention.
#pragma once

#include "common.cuh"
#include "ddtree/attention.h"
#include "ddtree/attention_plan.h"

namespace ddtree {

namespace {

struct AttentionArgs {
    TreeAttention call;
    AttentionPlan plan;
    float scale_log2;
    float* partial_out;  // [N, Hkv, splits, rows, D], not yet divided by its sum
    float* partial_sum;  // [N, Hkv, splits, rows, 2]: largest score in units of log2, sum of exponentials
};

}  // namespace

}  // namespace ddtree
