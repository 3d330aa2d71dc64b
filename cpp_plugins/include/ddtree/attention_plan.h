// The division of a tree attention call into blocks, and its scratch memory: arithmetic on extents alone, so that the
// launcher, the TensorRT plugin and the memory plan in Python compute the same number.
//
// Letters as in attention.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace ddtree {

constexpr int kTileKeys = 64;   // keys a block processes in one step
constexpr int kUnitKeys = 256;  // keys of a unit: what is summed apart, whoever sums it
constexpr int kMargin = 16;     // of the keys before a row's own so many at least are in its tail
constexpr int kWarpRows = 16;   // rows of one tensor-core product
// Calls of so few tokens, or of so few blocks, leave multiprocessors idle unless several blocks share the units.
constexpr int kSharingTokens = 8;
constexpr int kSharingBlocks = 66;

struct AttentionExtents {
    int32_t sequences;  // N
    int32_t tokens;     // T
    int32_t q_heads;    // Hq
    int32_t kv_heads;   // Hkv
    int32_t head_dim;   // D
    int32_t capacity;   // S
    int32_t splits;     // as in attention.h
};

struct AttentionPlan {
    int32_t warps;      // of a block, each with 16 rows
    int32_t rows;       // T * Hq / Hkv
    int32_t row_tiles;  // blocks that the rows make
    int32_t units;      // of a whole slot
    bool folds;         // a block folds the units of its rows itself, and stores one part for all of them
    int32_t parts;      // a row stores: of every unit, or of all, and of its tail
    // Queries of one token in a tail, which are rows of one product: the heads that share a key head, 16 at most.
    int32_t head_tiles;
    int32_t tails;  // T * head_tiles, each of a warp
};

inline AttentionPlan plan_attention(const AttentionExtents& call) {
    AttentionPlan plan{};
    const int32_t group = call.q_heads / call.kv_heads;
    const auto ceil = [](int32_t a, int32_t b) { return a / b + (a % b != 0); };
    plan.rows = call.tokens * group;
    plan.warps = plan.rows <= kWarpRows ? 1 : 4;
    plan.row_tiles = ceil(plan.rows, kWarpRows * plan.warps);
    plan.units = ceil(call.capacity, kUnitKeys);
    const int64_t blocks = static_cast<int64_t>(call.sequences) * call.kv_heads * plan.row_tiles;
    plan.folds = call.splits != 0 ? call.splits < 0 : call.tokens > kSharingTokens && blocks > kSharingBlocks;
    plan.parts = (plan.folds ? 1 : plan.units) + 1;
    plan.head_tiles = ceil(group, kWarpRows);
    plan.tails = call.tokens * plan.head_tiles;
    return plan;
}

// Parts of a whole call, of one row each.
inline int64_t partial_rows(const AttentionExtents& call, const AttentionPlan& plan) {
    return static_cast<int64_t>(call.sequences) * call.kv_heads * plan.parts * plan.rows;
}

// Scratch of one call: of every part D outputs, the largest score and the sum of the exponentials, in float32.
inline size_t partial_bytes(const AttentionExtents& call) {
    return static_cast<size_t>(partial_rows(call, plan_attention(call))) * (call.head_dim + 2) * sizeof(float);
}

// The most any call of 1 ... N sequences and 1 ... T tokens takes. Extents are positive and T is at most S.
inline size_t most_partial_bytes(AttentionExtents call) {
    const int32_t most_sequences = call.sequences, most_tokens = call.tokens;
    size_t most = 0;
    for (call.tokens = 1; call.tokens <= most_tokens; ++call.tokens) {
        // It grows with N until units are folded, and then again.
        const int32_t sharing = kSharingBlocks / (call.kv_heads * plan_attention(call).row_tiles);
        for (const int32_t sequences : {most_sequences, std::clamp(sharing, 1, most_sequences)}) {
            call.sequences = sequences;
            most = std::max(most, partial_bytes(call));
        }
    }
    return most;
}

}  // namespace ddtree
