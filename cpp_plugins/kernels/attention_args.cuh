// What the kernels of tree attention share: arguments, the place of a sequence's rows, and how parts are joined.
//
// The sums of a row are a function of its position p in the text, of the keys there and of nothing else: not of T, N,
// the rows beside it or the GPU. Its keys, by position, are a head, [0, head_end(p)), and a tail, up to p. The head is
// cut into units at multiples of 256; each unit and the tail is an online softmax over tiles of 64 positions, and the
// results are folded from left to right. A key's place in a tile is its position, wherever it is stored, and a place
// that a row does not see adds exactly nothing to it: its weight is +0 and the largest score stays.
//
// In a tree a row sees no more than its depth of new rows, so most heads are committed rows, which all rows share, and
// new rows are in tails, which are gathered along a row's path. Tokens that see all before them (chains, beginnings of
// trees) lie at their positions as they are. Paths of more than kMargin + 1 tokens that have gaps do neither: a block
// gathers all of their keys that may be new, tile by tile.
#pragma once

#include "common.cuh"
#include "ddtree/attention.h"
#include "ddtree/attention_plan.h"

namespace ddtree {

namespace {

struct AttentionArgs {
    TreeAttention call;
    AttentionPlan plan;
    int32_t sharing;      // blocks that take the units of a row in turn
    int32_t head_blocks;  // of the grid, before those of tails
    float scale_log2;
    float* partial_out;  // [N, Hkv, parts, rows, D], not yet divided by its sum
    float* partial_sum;  // [N, Hkv, parts, rows, 2]: largest score in units of log2, sum of exponentials
};

__device__ int head_end(int position) { return position < kMargin ? 0 : (position - kMargin) / kTileKeys * kTileKeys; }

// A sequence and a key head.
struct Place {
    int n, head, past;
    int64_t cache_row0;  // of this slot and head
};

__device__ Place make_place(const TreeAttention& a, int pair) {
    Place place;
    place.n = pair / a.kv_heads;
    place.head = pair % a.kv_heads;
    place.past = clamped(a.past_len[place.n], 0, a.capacity - a.tokens);
    const int slot = clamped(a.slot_ids[place.n], 0, a.slots - 1);
    place.cache_row0 = (static_cast<int64_t>(slot) * a.kv_heads + place.head) * a.capacity;
    return place;
}

// Word `w` of the mask of `token`, without the bits of later tokens.
__device__ uint32_t mask_word(const TreeAttention& a, int n, int token, int w) {
    const auto bits =
        static_cast<uint32_t>(a.tree_mask[(static_cast<int64_t>(n) * a.tokens + token) * a.mask_words + w]);
    return w < token / 32 ? bits : bits & (~0u >> (31 - token % 32));
}

// How many of the new tokens `token` sees, itself included; not for MaskMode none. Its position is past + seen - 1.
__device__ int tokens_seen(const TreeAttention& a, int n, int token) {
    if (a.mask_mode != MaskMode::tree) {
        return token + 1;
    }
    int seen = 0;
    for (int w = 0; w <= token / 32; ++w) {
        seen += device::count_bits(mask_word(a, n, token, w));
    }
    return seen;
}

// Number `k`, from 0, of the tokens that `token` sees.
__device__ int token_seen(const TreeAttention& a, int n, int token, int k) {
    if (a.mask_mode != MaskMode::tree) {
        return k;
    }
    for (int w = 0; w <= token / 32; ++w) {
        uint32_t bits = mask_word(a, n, token, w);
        const int here = device::count_bits(bits);
        if (k < here) {
            for (; k > 0; --k) {
                bits &= bits - 1;
            }
            return w * 32 + device::first_bit(bits);
        }
        k -= here;
    }
    return token;
}

// Whether the path to `token`, of which it sees so many, is one that must be gathered tile by tile.
__device__ bool is_deep(int token, int seen) { return seen != token + 1 && seen > kMargin + 1; }
// Where the gathered keys of such a path begin: its head before them is committed, and other blocks' work. What a block
// has folded cannot be added to by another, so there all of it is gathered.
__device__ int gathered_from(const AttentionPlan& plan, int past) {
    return plan.folds ? 0 : past / kUnitKeys * kUnitKeys;
}

// Keys before this position are those that head blocks take for a token's rows.
__device__ int head_limit(const AttentionArgs& args, const Place& place, int token) {
    const TreeAttention& a = args.call;
    if (a.mask_mode == MaskMode::none) {
        return place.past + a.tokens;
    }
    const int seen = tokens_seen(a, place.n, token);
    return is_deep(token, seen) ? gathered_from(args.plan, place.past) : head_end(place.past + seen - 1);
}

// The weights of two parts of a row in their sum. A part that is empty (largest -inf, all else 0) changes nothing.
struct Fold {
    float largest, before, added;

    __device__ Fold(float before_largest, float added_largest) : largest(fmaxf(before_largest, added_largest)) {
        const float base = largest == -__builtin_huge_valf() ? 0.0f : largest;  // inf - inf would be NaN
        before = device::exp2_fast(before_largest - base);
        added = device::exp2_fast(added_largest - base);
    }
    // Rounded as it is written, so that blocks and `combine` have the same bits.
    __device__ float operator()(float x, float y) const { return device::fused(y, added, device::product(x, before)); }
};

}  // namespace

}  // namespace ddtree
