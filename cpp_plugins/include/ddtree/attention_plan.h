// The division of a tree attention call into blocks, and its scratch memory: arithmetic on extents alone, so that the
// launcher, the TensorRT plugin and the memory plan in Python compute the same number.
//
// Letters as in attention.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace ddtree {

constexpr int kTileKeys = 64;  // keys a block processes in one step
constexpr int kWarpRows = 16;  // rows of one tensor-core product
// Of the largest GPU considered; what is set aside for it serves every other, which cuts the keys into fewer parts.
constexpr int32_t kMostMultiprocessors = 192;

struct AttentionExtents {
    int32_t sequences;  // N
    int32_t tokens;     // T
    int32_t q_heads;    // Hq
    int32_t kv_heads;   // Hkv
    int32_t head_dim;   // D
    int32_t capacity;   // S
    int32_t splits;     // parts the keys are cut into; 0 lets the plan choose
    int32_t multiprocessors = kMostMultiprocessors;
};

// A block has row_warps * key_warps warps: each owns 16 rows and 64 / key_warps keys of every tile.
struct AttentionPlan {
    int32_t row_warps;
    int32_t key_warps;
    int32_t rows;  // T * Hq / Hkv
    int32_t row_tiles;
    int32_t splits;
};

inline AttentionPlan plan_attention(const AttentionExtents& call) {
    AttentionPlan plan{};
    plan.rows = call.tokens * (call.q_heads / call.kv_heads);
    // With few rows the warps of a block can share keys only.
    plan.row_warps = plan.rows <= kWarpRows ? 1 : plan.rows <= 4 * kWarpRows ? 4 : 8;
    plan.key_warps = plan.row_warps == 1 ? 4 : 1;
    plan.row_tiles = (plan.rows + kWarpRows * plan.row_warps - 1) / (kWarpRows * plan.row_warps);
    if (call.splits > 0) {
        plan.splits = call.splits;
        return plan;
    }
    // One wave of blocks: a multiprocessor has registers for so many. past_len is on the device, so one cut must serve
    // every length: a short past leaves parts empty.
    const int64_t wanted = call.multiprocessors * (plan.row_warps == 8 ? 1 : plan.row_warps == 4 ? 2 : 3);
    const int64_t blocks = std::max<int64_t>(1, static_cast<int64_t>(call.sequences) * call.kv_heads * plan.row_tiles);
    const int64_t tiles = (static_cast<int64_t>(call.capacity) + kTileKeys - 1) / kTileKeys;
    plan.splits = static_cast<int32_t>(std::max<int64_t>(1, std::min(wanted / blocks, tiles)));
    return plan;
}

// Rows of partial results of a whole call: none where the keys stay in one part.
inline int64_t partial_rows(const AttentionExtents& call, const AttentionPlan& plan) {
    return plan.splits == 1 ? 0 : static_cast<int64_t>(call.sequences) * call.kv_heads * plan.splits * plan.rows;
}

// Scratch of one call on the largest GPU considered: of every partial row D outputs, its largest score and the sum of
// its exponentials, in float32.
inline size_t partial_bytes(const AttentionExtents& call) {
    return static_cast<size_t>(partial_rows(call, plan_attention(call))) * (call.head_dim + 2) * sizeof(float);
}

// The most any call of 1 ... N sequences and 1 ... T tokens takes. Fewer of either can take more: they leave room for
// more parts. Extents are positive and T is at most S.
inline size_t most_partial_bytes(AttentionExtents call) {
    if (call.splits > 0) {
        return partial_bytes(call);  // a given number of parts grows with N and T alone
    }
    const int32_t most_sequences = call.sequences, most_tokens = call.tokens;
    size_t most = 0;
    // Rising N or T only lowers the number of parts, so both searches end where one part is left.
    for (call.tokens = 1; call.tokens <= most_tokens; ++call.tokens) {
        for (call.sequences = 1; call.sequences <= most_sequences; ++call.sequences) {
            if (plan_attention(call).splits == 1) {
                break;
            }
            most = std::max(most, partial_bytes(call));
        }
        if (call.sequences == 1) {
            break;
        }
    }
    return most;
}

}  // namespace ddtree
