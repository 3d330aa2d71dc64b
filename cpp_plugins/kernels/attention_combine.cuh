// The second kernel of tree attention: adds up the parts the keys were split into.
#pragma once

#include <type_traits>

#include "attention_args.cuh"

namespace ddtree {

namespace {

constexpr int kCombineWarps = 4;

// One warp per row adds up the row's parts.
template <ElementType kType, int kHeadDim>
__global__ void __launch_bounds__(kWarp* kCombineWarps) combine(const AttentionArgs args) {
    constexpr int kColumns = kHeadDim / kWarp;  // of one lane
    const TreeAttention& a = args.call;
    const int splits = args.plan.splits;
    const int lane = threadIdx.x % kWarp;
    const int row = static_cast<int>(blockIdx.x) * kCombineWarps + static_cast<int>(threadIdx.x) / kWarp;
    if (row >= args.plan.rows) {
        return;
    }
    const int64_t part0 = static_cast<int64_t>(blockIdx.y) * splits * args.plan.rows + row;
    const auto* parts = reinterpret_cast<const Float2*>(args.partial_sum);

    float top = -__builtin_huge_valf();
    for (int s = lane; s < splits; s += kWarp) {
        top = fmaxf(top, parts[part0 + static_cast<int64_t>(s) * args.plan.rows].x[0]);
    }
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
        top = fmaxf(top, device::shuffle_xor(top, lanes));
    }
    const float base = top == -__builtin_huge_valf() ? 0.0f : top;
    float total = 0.0f;
    float x[kColumns] = {};
    for (int s = 0; s < splits; ++s) {
        const int64_t part = part0 + static_cast<int64_t>(s) * args.plan.rows;
        const Float2 of = parts[part];
        if (of.x[1] == 0.0f) {  // an empty part never wrote its output
            continue;
        }
        const float weight = device::exp2_fast(of.x[0] - base);
        total += weight * of.x[1];
        using Columns = std::conditional_t<kColumns == 4, Float4, Float2>;
        const Columns from = *reinterpret_cast<const Columns*>(args.partial_out + part * kHeadDim + lane * kColumns);
        DDTREE_UNROLL
        for (int e = 0; e < kColumns; ++e) {
            x[e] += weight * from.x[e];
        }
    }
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    const int group = a.q_heads / a.kv_heads;
    const int n = blockIdx.y / a.kv_heads;
    const int head = blockIdx.y % a.kv_heads * group + row % group;
    const int64_t to = (static_cast<int64_t>(n) * a.tokens + row / group) * a.q_heads + head;
    auto* words = static_cast<uint32_t*>(a.out) + (to * kHeadDim + lane * kColumns) / 2;
    DDTREE_UNROLL
    for (int e = 0; e < kColumns / 2; ++e) {
        words[e] = device::pack<kType>(x[2 * e] * inverse, x[2 * e + 1] * inverse);
    }
}

}  // namespace

}  // namespace ddtree
