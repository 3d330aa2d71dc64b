// Tree attention with split keys, in the manner of FlashAttention-2 / flash decoding: online softmax over tiles of
// keys, tensor-core products, and a second kernel that combines the parts.
//
// Rows are (token, query head of the group) pairs, token-major, so that one pass over a key/value head serves its whole
// group. Keys are the committed past, read from the cache, followed by the T new tokens, read from the inputs: nothing
// in the launch reads the rows it appends, so no order among blocks is needed.

#pragma once

#include "attention_args.cuh"

namespace ddtree {

namespace {

template <int kHeadDim>
constexpr size_t shared_bytes(int warps) {
    // Two stages of keys and values, where the output of every warp is gathered in the end, and its maxima and sums.
    return 4 * kTileKeys * kHeadDim * 2 + 2 * warps * kWarpRows * sizeof(float);
}

// Rows are cut into 16-byte chunks; exchanging them spreads eight rows of one chunk over all memory banks.
template <int kHeadDim>
__device__ int chunk_offset(int row, int chunk) {
    return row * kHeadDim * 2 + ((chunk ^ (row & 7)) * 16);
}
// The same for float rows, in units of floats; `column` in groups of eight.
template <int kHeadDim>
__device__ int float_offset(int row, int column) {
    return row * kHeadDim + (column ^ ((row & 7) * 8));
}

// The work of one block.
struct Place {
    int n, head, past, row0;
    int64_t cache_row0;  // of this slot and head
    int keys;            // past and those new tokens that a row of this block may see
};

__device__ Place make_place(const AttentionArgs& args, int n, int head, int row_tile) {
    const TreeAttention& a = args.call;
    const int slot = clamped(a.slot_ids[n], 0, a.slots - 1);
    Place place;
    place.n = n;
    place.head = head;
    place.past = clamped(a.past_len[n], 0, a.capacity - a.tokens);
    place.row0 = row_tile * kWarpRows * args.plan.row_warps;
    place.cache_row0 = (static_cast<int64_t>(slot) * a.kv_heads + head) * a.capacity;
    const int last_row = smaller(place.row0 + kWarpRows * args.plan.row_warps, args.plan.rows) - 1;
    const int seen = a.mask_mode == MaskMode::none ? a.tokens : last_row / (a.q_heads / a.kv_heads) + 1;
    place.keys = place.past + seen;
    return place;
}

__device__ bool visible(const TreeAttention& a, int n, int token, int fresh) {
    if (fresh < 0) {
        return true;
    }
    if (a.mask_mode == MaskMode::none) {
        return fresh < a.tokens;
    }
    if (fresh > token) {
        return false;
    }
    if (a.mask_mode == MaskMode::causal) {
        return true;
    }
    const int64_t word = (static_cast<int64_t>(n) * a.tokens + token) * a.mask_words + fresh / 32;
    return (static_cast<uint32_t>(a.tree_mask[word]) >> (fresh % 32)) & 1u;
}

// Copies every plan.splits-th new row, beginning with `split`, into the cache.
template <int kHeadDim, int kThreads>
__device__ void append(const TreeAttention& a, const Place& place, int split, int splits) {
    constexpr int kChunks = kHeadDim / 8;
    const int mine = ceil_div(a.tokens - split, splits);  // 0 or less when there are more parts than tokens
    for (int i = threadIdx.x; i < mine * kChunks; i += kThreads) {
        const int token = split + (i / kChunks) * splits;
        const int chunk = i % kChunks;
        const int64_t from =
            ((static_cast<int64_t>(place.n) * a.tokens + token) * a.kv_heads + place.head) * kChunks + chunk;
        const int64_t to = (place.cache_row0 + place.past + token) * kChunks + chunk;
        static_cast<Bytes16*>(a.present_k)[to] = static_cast<const Bytes16*>(a.k)[from];
        static_cast<Bytes16*>(a.present_v)[to] = static_cast<const Bytes16*>(a.v)[from];
    }
}

// Starts the copy of a tile of keys and values; rows at and after place.keys become zeros.
template <int kHeadDim, int kThreads>
__device__ void load_tile(const TreeAttention& a, const Place& place, int tile, unsigned char* stage) {
    constexpr int kChunks = kHeadDim / 8;
    unsigned char* values = stage + kTileKeys * kHeadDim * 2;
    for (int i = threadIdx.x; i < kTileKeys * kChunks; i += kThreads) {
        const int row = i / kChunks;
        const int chunk = i % kChunks;
        const int key = tile * kTileKeys + row;
        const bool valid = key < place.keys;
        const bool committed = key < place.past;
        const int64_t fresh = (static_cast<int64_t>(place.n) * a.tokens + (key - place.past)) * a.kv_heads + place.head;
        const int64_t source = !valid ? 0 : (committed ? place.cache_row0 + key : fresh) * kChunks + chunk;
        const void* keys = committed ? a.past_k : a.k;
        const void* vals = committed ? a.past_v : a.v;
        const int offset = chunk_offset<kHeadDim>(row, chunk);
        device::copy_async(stage + offset, static_cast<const Bytes16*>(keys) + source, valid);
        device::copy_async(values + offset, static_cast<const Bytes16*>(vals) + source, valid);
    }
}

// Starts the copy of the block's query rows; rows beyond the last become zeros.
template <int kHeadDim, int kThreads>
__device__ void load_queries(const AttentionArgs& args, const Place& place, unsigned char* stage) {
    constexpr int kChunks = kHeadDim / 8;
    const TreeAttention& a = args.call;
    const int group = a.q_heads / a.kv_heads;
    for (int i = threadIdx.x; i < kWarpRows * args.plan.row_warps * kChunks; i += kThreads) {
        const int row = place.row0 + i / kChunks;
        const int chunk = i % kChunks;
        const bool valid = row < args.plan.rows;
        const int64_t token = static_cast<int64_t>(place.n) * a.tokens + row / group;
        const int64_t source = valid ? (token * a.q_heads + place.head * group + row % group) * kChunks + chunk : 0;
        device::copy_async(stage + chunk_offset<kHeadDim>(i / kChunks, chunk),
                           static_cast<const Bytes16*>(a.q) + source, valid);
    }
}

// The running softmax of one warp's 16 rows over its share of the keys. Lane l holds rows l / 4 and l / 4 + 8.
template <int kHeadDim>
struct Running {
    float out[kHeadDim / 8][4];  // tensor-core accumulators, eight columns each
    float largest[2];            // of the rows' scores so far, in units of log2
    float sum[2];                // of this lane's exponentials
};

template <ElementType kType, int kHeadDim, int kKeys>
__device__ void attend_tile(const TreeAttention& a, const Place& place, const uint32_t (&q)[kHeadDim / 16][4],
                            const int (&token)[2], int first_key, int stage_row, float scale_log2,
                            const unsigned char* stage, Running<kHeadDim>& running) {
    const int lane = threadIdx.x % kWarp;
    const unsigned char* values = stage + kTileKeys * kHeadDim * 2;

    float score[kKeys / 8][4];
    DDTREE_UNROLL
    for (int j = 0; j < kKeys / 8; ++j) {
        DDTREE_UNROLL
        for (int e = 0; e < 4; ++e) {
            score[j][e] = 0.0f;
        }
        DDTREE_UNROLL
        for (int d = 0; d < kHeadDim / 32; ++d) {
            uint32_t b[4];
            device::load_matrices(b, stage + chunk_offset<kHeadDim>(stage_row + j * 8 + lane % 8, d * 4 + lane / 8));
            device::multiply_add<kType>(score[j], q[2 * d], b[0], b[1]);
            device::multiply_add<kType>(score[j], q[2 * d + 1], b[2], b[3]);
        }
    }

    const float nothing = -__builtin_huge_valf();
    const bool all_visible = first_key + kKeys <= place.past;
    float largest[2] = {running.largest[0], running.largest[1]};
    DDTREE_UNROLL
    for (int j = 0; j < kKeys / 8; ++j) {
        DDTREE_UNROLL
        for (int e = 0; e < 4; ++e) {
            const int fresh = first_key + j * 8 + 2 * (lane % 4) + e % 2 - place.past;
            const bool seen = all_visible || visible(a, place.n, token[e / 2], fresh);
            score[j][e] = seen ? score[j][e] * scale_log2 : nothing;
            largest[e / 2] = fmaxf(largest[e / 2], score[j][e]);
        }
    }
    float base[2];
    DDTREE_UNROLL
    for (int r = 0; r < 2; ++r) {
        largest[r] = fmaxf(largest[r], device::shuffle_xor(largest[r], 1));
        largest[r] = fmaxf(largest[r], device::shuffle_xor(largest[r], 2));
        base[r] = largest[r] == nothing ? 0.0f : largest[r];  // inf - inf would be NaN
        const float shrink = device::exp2_fast(running.largest[r] - base[r]);
        running.largest[r] = largest[r];
        running.sum[r] *= shrink;
        DDTREE_UNROLL
        for (int d = 0; d < kHeadDim / 8; ++d) {
            running.out[d][2 * r] *= shrink;
            running.out[d][2 * r + 1] *= shrink;
        }
    }

    DDTREE_UNROLL
    for (int j = 0; j < kKeys / 16; ++j) {
        // Accumulators of two neighbouring score blocks are, packed, one left operand of the next product.
        uint32_t p[4];
        DDTREE_UNROLL
        for (int half = 0; half < 2; ++half) {
            DDTREE_UNROLL
            for (int r = 0; r < 2; ++r) {
                const float low = device::exp2_fast(score[2 * j + half][2 * r] - base[r]);
                const float high = device::exp2_fast(score[2 * j + half][2 * r + 1] - base[r]);
                running.sum[r] += low + high;
                p[2 * half + r] = device::pack<kType>(low, high);
            }
        }
        DDTREE_UNROLL
        for (int d = 0; d < kHeadDim / 16; ++d) {
            uint32_t b[4];
            device::load_matrices_transposed(
                b, values + chunk_offset<kHeadDim>(stage_row + j * 16 + lane % 16, d * 2 + lane / 16));
            device::multiply_add<kType>(running.out[2 * d], p, b[0], b[1]);
            device::multiply_add<kType>(running.out[2 * d + 1], p, b[2], b[3]);
        }
    }
}

// Merges the key warps of each row and writes the row's output, or its part when keys are split.
template <ElementType kType, int kHeadDim, int kRowWarps, int kKeyWarps>
__device__ void write_rows(const AttentionArgs& args, const Place& place, int split, const float* out,
                           const float* largest, const float* sum) {
    constexpr int kThreads = kWarp * kRowWarps * kKeyWarps;
    constexpr int kChunks = kHeadDim / 8;
    const TreeAttention& a = args.call;
    const int group = a.q_heads / a.kv_heads;
    const float nothing = -__builtin_huge_valf();
    for (int i = threadIdx.x; i < kWarpRows * kRowWarps * kChunks; i += kThreads) {
        const int local = i / kChunks;
        const int chunk = i % kChunks;
        const int row = place.row0 + local;
        if (row >= args.plan.rows) {
            continue;
        }
        float top = nothing;
        DDTREE_UNROLL
        for (int w = 0; w < kKeyWarps; ++w) {
            top = fmaxf(top, largest[w * kWarpRows * kRowWarps + local]);
        }
        const float base = top == nothing ? 0.0f : top;
        float total = 0.0f;
        float x[8] = {};
        DDTREE_UNROLL
        for (int w = 0; w < kKeyWarps; ++w) {
            const int from = w * kWarpRows * kRowWarps + local;
            const float weight = device::exp2_fast(largest[from] - base);
            total += weight * sum[from];
            DDTREE_UNROLL
            for (int e = 0; e < 8; ++e) {
                x[e] += weight * out[float_offset<kHeadDim>(from, chunk * 8) + e];
            }
        }
        if (args.plan.splits == 1) {
            const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
            Bytes16 packed;
            DDTREE_UNROLL
            for (int e = 0; e < 4; ++e) {
                packed.word[e] = device::pack<kType>(x[2 * e] * inverse, x[2 * e + 1] * inverse);
            }
            const int64_t token = static_cast<int64_t>(place.n) * a.tokens + row / group;
            static_cast<Bytes16*>(a.out)[(token * a.q_heads + place.head * group + row % group) * kChunks + chunk] =
                packed;
        } else {
            const int64_t part =
                ((static_cast<int64_t>(place.n) * a.kv_heads + place.head) * args.plan.splits + split) *
                    args.plan.rows +
                row;
            auto* to = reinterpret_cast<Float4*>(args.partial_out + part * kHeadDim + chunk * 8);
            to[0] = {{x[0], x[1], x[2], x[3]}};
            to[1] = {{x[4], x[5], x[6], x[7]}};
            if (chunk == 0) {
                reinterpret_cast<Float2*>(args.partial_sum)[part] = {{top, total}};
            }
        }
    }
}

template <ElementType kType, int kHeadDim, int kRowWarps, int kKeyWarps>
__global__ void __launch_bounds__(kWarp * kRowWarps * kKeyWarps) attend(const AttentionArgs args) {
    constexpr int kThreads = kWarp * kRowWarps * kKeyWarps;
    constexpr int kKeys = kTileKeys / kKeyWarps;  // of a tile, for one warp
    constexpr int kStageBytes = 2 * kTileKeys * kHeadDim * 2;
    static_assert(kWarpRows * kRowWarps * kHeadDim * 2 <= kStageBytes, "queries pass through one stage");
    static_assert(kRowWarps * kKeyWarps * kWarpRows * kHeadDim * 4 <= 2 * kStageBytes, "outputs pass through both");
    DDTREE_DYNAMIC_SHARED(shared);

    const TreeAttention& a = args.call;
    const int splits = args.plan.splits;
    const int split = blockIdx.y;
    const Place place = make_place(args, blockIdx.z / a.kv_heads, blockIdx.z % a.kv_heads, blockIdx.x);
    if (blockIdx.x == 0) {
        append<kHeadDim, kThreads>(a, place, split, splits);
    }

    const int tiles = ceil_div(place.keys, kTileKeys);
    const int per_split = ceil_div(tiles, splits);
    const int first = split * per_split;
    const int last = smaller(first + per_split, tiles);
    if (first >= last) {  // only with several splits: there is always a tile
        const int64_t part =
            ((static_cast<int64_t>(place.n) * a.kv_heads + place.head) * splits + split) * args.plan.rows;
        for (int i = threadIdx.x; i < kWarpRows * kRowWarps && place.row0 + i < args.plan.rows; i += kThreads) {
            reinterpret_cast<Float2*>(args.partial_sum)[part + place.row0 + i] = {{-__builtin_huge_valf(), 0.0f}};
        }
        return;
    }

    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int row_warp = warp % kRowWarps;
    const int key_warp = warp / kRowWarps;
    const int warp_row0 = place.row0 + row_warp * kWarpRows;
    const bool active = warp_row0 < args.plan.rows;

    // The queries use the second stage while the first tile arrives in the first.
    load_queries<kHeadDim, kThreads>(args, place, shared + kStageBytes);
    device::copy_commit();
    load_tile<kHeadDim, kThreads>(a, place, first, shared);
    device::copy_commit();
    device::copy_wait<1>();
    device::sync_block();
    uint32_t q[kHeadDim / 16][4];
    DDTREE_UNROLL
    for (int d = 0; d < kHeadDim / 16; ++d) {
        device::load_matrices(
            q[d], shared + kStageBytes + chunk_offset<kHeadDim>(row_warp * kWarpRows + lane % 16, d * 2 + lane / 16));
    }
    device::sync_block();

    const int group = a.q_heads / a.kv_heads;
    const int token[2] = {smaller((warp_row0 + lane / 4) / group, a.tokens - 1),
                          smaller((warp_row0 + lane / 4 + 8) / group, a.tokens - 1)};
    Running<kHeadDim> running;
    DDTREE_UNROLL
    for (int d = 0; d < kHeadDim / 8; ++d) {
        DDTREE_UNROLL
        for (int e = 0; e < 4; ++e) {
            running.out[d][e] = 0.0f;
        }
    }
    DDTREE_UNROLL
    for (int r = 0; r < 2; ++r) {
        running.largest[r] = -__builtin_huge_valf();
        running.sum[r] = 0.0f;
    }

    for (int tile = first; tile < last; ++tile) {
        unsigned char* stage = shared + ((tile - first) % 2) * kStageBytes;
        if (tile + 1 < last) {
            load_tile<kHeadDim, kThreads>(a, place, tile + 1, shared + ((tile + 1 - first) % 2) * kStageBytes);
        }
        device::copy_commit();  // empty after the last tile, so that the count below stays right
        device::copy_wait<1>();
        device::sync_block();
        if (active) {
            attend_tile<kType, kHeadDim, kKeys>(a, place, q, token, tile * kTileKeys + key_warp * kKeys,
                                                key_warp * kKeys, args.scale_log2, stage, running);
        }
        device::sync_block();
    }

    float* out = reinterpret_cast<float*>(shared);
    float* largest = reinterpret_cast<float*>(shared + 2 * kStageBytes);
    float* sum = largest + kWarpRows * kRowWarps * kKeyWarps;
    if (active) {
        DDTREE_UNROLL
        for (int r = 0; r < 2; ++r) {
            const int row = warp * kWarpRows + lane / 4 + 8 * r;
            DDTREE_UNROLL
            for (int d = 0; d < kHeadDim / 8; ++d) {
                *reinterpret_cast<Float2*>(out + float_offset<kHeadDim>(row, d * 8) +
                                           2 * (lane % 4)) = {{running.out[d][2 * r], running.out[d][2 * r + 1]}};
            }
            float total = running.sum[r];
            total += device::shuffle_xor(total, 1);
            total += device::shuffle_xor(total, 2);
            if (lane % 4 == 0) {
                largest[row] = running.largest[r];
                sum[row] = total;
            }
        }
    }
    device::sync_block();
    // warp * 16 + row is (key_warp * row_warps + row_warp) * 16 + row: the order write_rows reads.
    write_rows<kType, kHeadDim, kRowWarps, kKeyWarps>(args, place, split, out, largest, sum);
}

}  // namespace

}  // namespace ddtree
