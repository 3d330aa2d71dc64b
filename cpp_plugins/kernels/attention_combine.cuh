// The second kernel of tree attention: folds the parts of every row and divides by their sum.
#pragma once

#include <type_traits>

#include "attention_args.cuh"

namespace ddtree {

namespace {

constexpr int kCombineWarps = 4;
constexpr int kPartsAhead = 8;  // whose loads are under way

// One warp per row.
template <ElementType kType, int kHeadDim>
__global__ void __launch_bounds__(kWarp* kCombineWarps) combine(const AttentionArgs args) {
    device::wait_and_trigger();
    constexpr int kColumns = kHeadDim / kWarp;  // of one lane
    using Columns = std::conditional_t<kColumns == 4, Float4, Float2>;
    const TreeAttention& a = args.call;
    const AttentionPlan& plan = args.plan;
    const int lane = threadIdx.x % kWarp;
    const int row = static_cast<int>(blockIdx.x) * kCombineWarps + static_cast<int>(threadIdx.x) / kWarp;
    if (row >= plan.rows) {
        return;
    }
    const int group = a.q_heads / a.kv_heads;
    const int token = row / group;
    const Place place = make_place(a, blockIdx.y);
    const bool tail = a.mask_mode != MaskMode::none;
    const int end = tail ? head_end(place.past + tokens_seen(a, place.n, token) - 1) : place.past + a.tokens;
    const int heads = plan.folds ? (end > 0 ? 1 : 0) : ceil_div(end, kUnitKeys);
    const int count = heads + (tail ? 1 : 0);
    const int64_t first_part = static_cast<int64_t>(blockIdx.y) * plan.parts;

    float largest = -__builtin_huge_valf();
    float total = 0.0f;
    float x[kColumns] = {};
    for (int first = 0; first < count; first += kPartsAhead) {
        Float2 of[kPartsAhead];
        Columns from[kPartsAhead];
        DDTREE_UNROLL
        for (int i = 0; i < kPartsAhead; ++i) {
            if (first + i < count) {
                const int part = first + i < heads ? first + i : plan.parts - 1;
                const int64_t at = (first_part + part) * plan.rows + row;
                of[i] = reinterpret_cast<const Float2*>(args.partial_sum)[at];
                from[i] = *reinterpret_cast<const Columns*>(args.partial_out + at * kHeadDim + lane * kColumns);
            }
        }
        DDTREE_UNROLL
        for (int i = 0; i < kPartsAhead; ++i) {
            if (first + i < count) {
                const Fold fold(largest, of[i].x[0]);
                largest = fold.largest;
                total = fold(total, of[i].x[1]);
                DDTREE_UNROLL
                for (int e = 0; e < kColumns; ++e) {
                    x[e] = fold(x[e], from[i].x[e]);
                }
            }
        }
    }
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    const int head = place.head * group + row % group;
    const int64_t to = (static_cast<int64_t>(place.n) * a.tokens + token) * a.q_heads + head;
    auto* words = static_cast<uint32_t*>(a.out) + (to * kHeadDim + lane * kColumns) / 2;
    DDTREE_UNROLL
    for (int e = 0; e < kColumns / 2; ++e) {
        words[e] = device::pack<kType>(x[2 * e] * inverse, x[2 * e + 1] * inverse);
    }
}

}  // namespace

}  // namespace ddtree
