// Attention of T new tokens over a slotted KV cache plus themselves.
//
// N sequences, T tokens each, Hq query heads in groups that share one of Hkv key/value heads, D head size, S rows of
// capacity per cache slot, W words per mask row.
#pragma once

#include "ddtree/launch.h"

namespace ddtree {

enum class ElementType : int32_t { bf16 = 0, fp16 = 1 };

// Which of the T new tokens token i sees; the committed past is always visible.
enum class MaskMode : int32_t {
    tree = 0,    // j with bit j % 32 of word j / 32 of tree_mask row i set, j <= i (nodes are in topological order)
    causal = 1,  // j <= i: prefill
    none = 2,    // all: the drafter's block
};

struct TreeAttention {
    const void* q;             // [N, T, Hq, D], after norm and RoPE
    const void* k;             // [N, T, Hkv, D]
    const void* v;             // [N, T, Hkv, D]
    const void* past_k;        // [slots, Hkv, S, D]
    const void* past_v;        // [slots, Hkv, S, D]
    void* present_k;           // the address of past_k: rows past_len ... past_len + T - 1 are written
    void* present_v;           // the address of past_v
    const int32_t* slot_ids;   // [N] on the device, clamped to 0 ... slots - 1
    const int32_t* past_len;   // [N] on the device, clamped to 0 ... S - T
    const int32_t* tree_mask;  // [N, T, W] on the device; unused unless mask_mode is tree
    void* out;                 // [N, T, Hq, D]; a token that sees nothing gets zeros
    void* workspace;           // attention_workspace_bytes() of scratch
    size_t workspace_bytes;
    int32_t sequences;  // N
    int32_t tokens;     // T
    int32_t q_heads;    // Hq
    int32_t kv_heads;   // Hkv
    int32_t head_dim;   // D: 64 or 128
    int32_t slots;
    int32_t capacity;    // S
    int32_t mask_words;  // W >= ceil(T / 32) when mask_mode is tree
    ElementType type;
    MaskMode mask_mode;
    float scale;  // of q . k, usually 1 / sqrt(D)
    // Blocks that share a row's keys, or -1: one, which folds what it has summed of them; 0 lets the launcher choose.
    // The result is the same to the bit.
    int32_t splits;
};

// Depends on the extents and splits only, never on the GPU, so that a graph's workspace can be planned anywhere.
size_t attention_workspace_bytes(const TreeAttention& call);
// The most any call of 1 ... call.sequences sequences and 1 ... call.tokens tokens needs. 0 for extents the launcher
// refuses.
size_t attention_workspace_bound(const TreeAttention& call);

// Two kernels: one appends the T key and value rows to the cache and sums parts of the keys, the other folds the parts.
// Sequences must have slots of their own; two with the same slot stay in bounds but race for its rows.
//
// In modes tree and causal a row's output is a function of its position and of queries, keys and values there: the same
// bits alone, in a chunk of a prompt, in a chain and in a tree with gaps, whatever N, T, S and the GPU are.
Status tree_attention(const TreeAttention& call, Stream stream);

}  // namespace ddtree
