// Gated delta nets over trees, and the commit of a path (arXiv 2412.06464; models/delta.py has the recurrence).
//
// N sequences, T tree tokens, Hk key heads that each serve Hv / Hk value heads one after the other, Dk and Dv head
// sizes, C = 2 Hk Dk + Hv Dv channels of the convolution, L delta-net layers. A head has a state S [Dk, Dv]. With G_j
// the sum of log decays down to node j, node j and its ancestors i change it by u:
//     u_j = b_j (v_j - exp(G_j) S^T k_j - sum over i of exp(G_j - G_i) (k_j . k_i) u_i)
//     o_j = exp(G_j) S^T q_j + sum over i and j of exp(G_j - G_i) (q_j . k_i) u_i
//     S  <- exp(G_l) S + sum over the path to l of exp(G_l - G_i) k_i u_i^T
#pragma once

#include "ddtree/attention.h"

namespace ddtree {

constexpr int32_t kMaxDeltaTokens = 512;  // T
constexpr int32_t kMaxDeltaKeys = 128;    // Dk

// One kernel. What it adds for a node depends on the node's path alone, in one order.
struct DeltaTree {
    const float* mixed;       // [N, T, C]: queries, keys and values behind the convolution, not normed
    const float* log_decays;  // [N, T, Hv], at most 0
    const float* steps;       // [N, T, Hv]: b
    const int32_t* parents;   // [N, T]; one that does not precede its node, as -1, makes it a root
    const float* states;      // [slots, Hv, Dk, Dv]
    const int32_t* slot_ids;  // [N], clamped to 0 ... slots - 1
    float* out;               // [N, T, Hv, Dv]: o
    float* keys;              // [N, T, Hk, Dk], of norm 1
    float* updates;           // [N, T, Hv, Dv]: u
    double* decays;           // [N, T, Hv]: G
    int32_t sequences, tokens, slots, key_heads, value_heads, key_dim, value_dim;
};
Status delta_tree(const DeltaTree& call, Stream stream);

// In place, for one slot in all layers, by what passes left of R rows. The rows are a path from a root.
struct DeltaCommit {
    float* states;             // [L, slots, Hv, Dk, Dv]
    float* past;               // [L, slots, W - 1, C]: the convolution's last inputs, the oldest first
    const float* keys;         // [L, R, Hk, Dk]
    const float* updates;      // [L, R, Hv, Dv]
    const double* decays;      // [L, R, Hv]
    const void* inputs;        // [L, R, C] of the convolution
    const int32_t* path;       // [M], clamped to 0 ... R - 1; null: first, first + 1, ...
    int32_t first, path_rows;  // M
    int32_t slot, slots, layers, rows, key_heads, value_heads, key_dim, value_dim;
    int32_t past_rows;  // W - 1
    int32_t single;     // 1: inputs are float32; 0: of the type
    ElementType type;
};
Status delta_commit(const DeltaCommit& call, Stream stream);

}  // namespace ddtree
