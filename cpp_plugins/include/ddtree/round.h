// The rest of a decoding round on the device: tree build, packed mask, walk, cache compaction. Together with
// attention.h they make a whole round without waiting for the host. All arrays are in device memory.
//
// N sequences, L draft positions, K candidates per position, T = 1 + n tree tokens at most, W = ceil(T / 32) words.
// Node 0 is the root (the bonus token); the parents of others precede them. Nodes at and after counts[i] are padding.
#pragma once

#include "ddtree/launch.h"

namespace ddtree {

constexpr int32_t kMaxDeviceBudget = 1024;

// Algorithm 1 of arXiv 2604.12989 with the order of the host's build_tree (tree.h), ties included. The nodes of a
// larger tree, whose beginning the tree is, are the outlook: what budgets are chosen by must be seen beyond the tree's
// end.
struct TreeBuild {
    const float* log_probs;      // [N, L, K], rows falling; NaN and -inf: candidates that are never chosen
    const int32_t* candidates;   // [N, L, K]
    const int32_t* root_tokens;  // [N]
    const int32_t* budgets;      // [N], clamped to 0 ... T - 1; null means T - 1
    const int32_t* past_len;     // [N]; null counts positions from 0
    int32_t* token_ids;          // [N, T]; padding repeats the root's token
    int32_t* parents;            // [N, T]; -1 for the root and for padding
    int32_t* depths;             // [N, T]; 0 for the root and for padding
    int32_t* positions;          // [N, T] past_len + depth; may be null
    int32_t* counts;             // [N] nodes of the tree, root included
    float* log_weights;          // [N, O] of the outlook's nodes 1 ... O, root not counted; -inf where there is none
    int32_t* outlook_depths;     // [N, O] theirs; 0 where there is none. A budget of 0 has no outlook
    int32_t sequences;           // N
    int32_t positions_l;         // L
    int32_t candidates_k;        // K
    int32_t tokens;              // T <= 1 + kMaxDeviceBudget
    int32_t outlook;             // O <= kMaxDeviceBudget; 0: none, and its arrays may be null
};
Status device_build_tree(const TreeBuild& call, Stream stream);

// Bit j % 32 of word j / 32 in row i is set when j is i or an ancestor of i. A parent that does not precede its child
// ends the climb.
struct PackedMask {
    const int32_t* parents;  // [N, T]
    int32_t* mask;           // [N, T, W]
    int32_t sequences, tokens, mask_words;
};
Status device_packed_mask(const PackedMask& call, Stream stream);

// The target's token after each node: the largest of its logits, each with noise of the token's own (noise.h) times a
// temperature, which is none where that is 0; of equal ones the lower id. NaN is where -inf is.
struct TokenChoice {
    const float* logits;        // [N, T, V]
    const int32_t* positions;   // [N, T] of the nodes in the whole sequence: a token is chosen for the one behind
    const float* temperatures;  // [N]
    const int64_t* seeds;       // [N]
    int32_t* choices;           // [N, T]
    int32_t sequences, tokens, vocabulary;
};
Status device_choose(const TokenChoice& call, Stream stream);

// In place, in every plane (a key or a value cache of one layer) of the sequence's slot and every head: row
// past_len + keep[j] becomes row past_len + j. keep must be strictly increasing and not negative; its first entry that
// is not, or that lies outside the slot, ends the list.
struct KvCompact {
    void* cache;                // [planes, slots, Hkv, S, row_bytes]
    const int32_t* slot_ids;    // [N], clamped to 0 ... slots - 1
    const int32_t* past_len;    // [N], clamped to 0 ... S
    const int32_t* keep;        // [N, max_keep]
    const int32_t* keep_count;  // [N], clamped to 0 ... max_keep; null means max_keep
    int32_t sequences, planes, slots, kv_heads, capacity, max_keep;
    int32_t row_bytes;  // a multiple of 16
};
Status device_compact(const KvCompact& call, Stream stream);

// The end of a round. From the root, follows the first child whose token is the target's choice at the current node,
// while there is one: the path, whose rows become the first of the pass's new ones in the cache, as in KvCompact, and
// whose tapped states come behind those that wait for the drafter. `result` of sequence n, [2 + 2 m + 2 T + 2 O]: nodes
// of the tree; those of the path; the target's choices along it [m], the first where it has ended; the path [m], -1
// where it has; the tree's token ids and parents [T], and its outlook's log-weights (bits of float32) and depths [O].
struct RoundCommit {
    const int32_t* parents;         // [N, T]
    const int32_t* token_ids;       // [N, T], the root's included
    const int32_t* choices;         // [N, T], the target's token after each node
    const int32_t* counts;          // [N], clamped to 1 ... T
    const float* log_weights;       // [N, O]; may be null where O is 0
    const int32_t* outlook_depths;  // [N, O]; likewise
    const int32_t* slot_ids;        // [N], clamped to 0 ... slots - 1
    const int32_t* holds;           // [N] whether the path's tapped states are kept
    const int32_t* active;          // [N] whether the slot's state changes
    const int32_t* before;  // [4, N] before the round: committed rows of the target's cache and of the drafter's,
                            // tapped states that wait, bonus token
    const void* tapped;     // [N, T, state_bytes]
    void* cache;            // [planes, slots, Hkv, S, row_bytes]
    void* waiting;          // [slots, B, state_bytes]; what has no room is not kept
    int32_t* states;        // [4, slots] as `before`: after the round
    int32_t* result;        // [N, ...]
    int32_t sequences, tokens, longest, outlook;  // N, T, m: nodes of the longest path, O
    int32_t planes, slots, kv_heads, capacity, waiting_rows;
    int32_t row_bytes, state_bytes;  // multiples of 16
};
Status device_commit(const RoundCommit& call, Stream stream);

}  // namespace ddtree
