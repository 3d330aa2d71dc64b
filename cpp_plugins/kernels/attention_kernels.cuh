// Tree attention in the manner of FlashAttention-2 / flash decoding: online softmax over tiles of keys and tensor-core
// products. attention_args.cuh says which keys are summed in which order, and why.
//
// Rows are (token, query head of the group) pairs, token-major, so that one pass over a key/value head serves its whole
// group. Blocks take heads of 16 rows a warp, or tails of a token a warp. Keys are the committed past, read from the
// cache, and the T new tokens, read from the inputs: nothing in the launch reads the rows it appends, so no order among
// blocks is needed.

#pragma once

#include "attention_args.cuh"

namespace ddtree {

namespace {

// What a block's shared memory holds first: numbers its warps tell each other.
struct Control {
    int of_warp[4];            // the last key of a warp's rows, or the tokens its token sees
    int path[4][kMargin + 1];  // the tokens a warp's token sees
};
constexpr size_t kControlBytes = 384;
static_assert(sizeof(Control) <= kControlBytes, "tiles begin behind it, aligned");

constexpr int kOwnRows = kMargin + 1;  // new rows that a warp gathers in a tail
// Rows side by side that the tails of a block read: 80 positions at most, and those of its other tokens.
__host__ __device__ constexpr int side_rows(int warps) { return kTileKeys + kMargin + warps - 1; }

template <int kHeadDim>
__host__ __device__ constexpr size_t stage_bytes() {  // keys and values of a tile
    return 2 * kTileKeys * kHeadDim * 2;
}
template <int kHeadDim>
size_t shared_bytes(int warps, bool folds) {
    const size_t folded = folds ? (kHeadDim / 2 + 4) * sizeof(float) * warps * kWarp : 0;
    const size_t tail = static_cast<size_t>(side_rows(warps) + warps * kOwnRows) * kHeadDim * 4;
    return kControlBytes + larger(2 * stage_bytes<kHeadDim>() + folded, tail);
}

// Rows are cut into 16-byte chunks; exchanging them spreads eight rows of one chunk over all memory banks.
template <int kHeadDim>
__device__ int chunk_offset(int row, int chunk) {
    return row * kHeadDim * 2 + ((chunk ^ (row & 7)) * 16);
}

// Starts the copy of `rows` keys and values from position `first` on to rows `row0` and on, by threads 0 ... kThreads -
// 1; those at and after `limit` become zeros. token_of(i) is the new token at position past + i.
template <int kHeadDim, int kThreads, typename TokenOf>
__device__ void load(const TreeAttention& a, const Place& place, int thread, int first, int rows, int limit,
                     TokenOf token_of, unsigned char* keys, unsigned char* values, int row0 = 0) {
    constexpr int kChunks = kHeadDim / 8;
    for (int i = thread; i < rows * kChunks; i += kThreads) {
        const int row = i / kChunks;
        const int chunk = i % kChunks;
        const int position = first + row;
        const bool valid = position < limit;
        const bool committed = position < place.past;
        int64_t source = 0;
        if (valid) {
            source = committed
                         ? place.cache_row0 + position
                         : (static_cast<int64_t>(place.n) * a.tokens + token_of(position - place.past)) * a.kv_heads +
                               place.head;
        }
        const auto* from_k = static_cast<const Bytes16*>(committed ? a.past_k : a.k) + source * kChunks + chunk;
        const auto* from_v = static_cast<const Bytes16*>(committed ? a.past_v : a.v) + source * kChunks + chunk;
        const int offset = chunk_offset<kHeadDim>(row0 + row, chunk);
        device::copy_async(keys + offset, from_k, valid);
        device::copy_async(values + offset, from_v, valid);
    }
}

// Likewise a whole tile of committed rows, which lie side by side: addresses are constants apart.
template <int kHeadDim, int kThreads>
__device__ void load_committed(const TreeAttention& a, const Place& place, int first, unsigned char* keys,
                               unsigned char* values) {
    constexpr int kChunks = kHeadDim / 8;
    const int thread = threadIdx.x;
    const int64_t from = (place.cache_row0 + first) * kChunks + thread;
    const auto* const from_k = static_cast<const Bytes16*>(a.past_k) + from;
    const auto* const from_v = static_cast<const Bytes16*>(a.past_v) + from;
    DDTREE_UNROLL
    for (int i = 0; i < kTileKeys * kChunks; i += kThreads) {
        const int row = thread / kChunks + i / kChunks;
        const int offset = i * 16 + thread / kChunks * kHeadDim * 2 + ((thread % kChunks ^ (row & 7)) * 16);
        device::copy_async(keys + offset, from_k + i, true);
        device::copy_async(values + offset, from_v + i, true);
    }
}

// The left operands of 16 query rows, of which this lane reads [N, T, Hq] rows `row`; -1: zeros.
template <int kHeadDim>
__device__ void read_queries(const TreeAttention& a, const int64_t (&row)[2], uint32_t (&q)[kHeadDim / 16][4]) {
    const auto* words = static_cast<const uint32_t*>(a.q) + threadIdx.x % 4;
    DDTREE_UNROLL
    for (int d = 0; d < kHeadDim / 16; ++d) {
        DDTREE_UNROLL
        for (int e = 0; e < 4; ++e) {
            q[d][e] = row[e % 2] < 0 ? 0 : words[row[e % 2] * (kHeadDim / 2) + d * 8 + e / 2 * 4];
        }
    }
}

// The online softmax of one warp's 16 rows. Lane l holds rows l / 4 and l / 4 + 8.
template <int kHeadDim>
struct Running {
    float out[kHeadDim / 8][4];  // tensor-core accumulators, eight columns each
    float largest[2];            // of the rows' scores so far, in units of log2
    float sum[2];                // of this lane's exponentials; of the rows' when `close` was called

    __device__ void clear() {
        DDTREE_UNROLL
        for (int d = 0; d < kHeadDim / 8; ++d) {
            DDTREE_UNROLL
            for (int e = 0; e < 4; ++e) {
                out[d][e] = 0.0f;
            }
        }
        DDTREE_UNROLL
        for (int r = 0; r < 2; ++r) {
            largest[r] = -__builtin_huge_valf();
            sum[r] = 0.0f;
        }
    }
    __device__ void close() {
        DDTREE_UNROLL
        for (int r = 0; r < 2; ++r) {
            sum[r] += device::shuffle_xor(sum[r], 1);
            sum[r] += device::shuffle_xor(sum[r], 2);
        }
    }
};

// Adds the keys at positions first ... first + kKeys - 1, as far as they are before a row's limit; row_of(i) is the row
// of shared memory where the key and the value at first + i are. All products that are added to are rounded as they are
// written, so that every kernel this is part of has the same bits.
template <ElementType kType, int kHeadDim, int kKeys, typename RowOf>
__device__ void attend_tile(const uint32_t (&q)[kHeadDim / 16][4], const int (&limit)[2], int first,
                            const unsigned char* keys, const unsigned char* values, RowOf row_of, float scale_log2,
                            Running<kHeadDim>& running) {
    const int lane = threadIdx.x % kWarp;

    float score[kKeys / 8][4];
    DDTREE_UNROLL
    for (int j = 0; j < kKeys / 8; ++j) {
        DDTREE_UNROLL
        for (int e = 0; e < 4; ++e) {
            score[j][e] = 0.0f;
        }
        const int row = row_of(j * 8 + lane % 8);
        DDTREE_UNROLL
        for (int d = 0; d < kHeadDim / 32; ++d) {
            uint32_t b[4];
            device::load_matrices(b, keys + chunk_offset<kHeadDim>(row, d * 4 + lane / 8));
            device::multiply_add<kType>(score[j], q[2 * d], b[0], b[1]);
            device::multiply_add<kType>(score[j], q[2 * d + 1], b[2], b[3]);
        }
    }

    const float nothing = -__builtin_huge_valf();
    float largest[2] = {running.largest[0], running.largest[1]};
    DDTREE_UNROLL
    for (int j = 0; j < kKeys / 8; ++j) {
        DDTREE_UNROLL
        for (int e = 0; e < 4; ++e) {
            const int position = first + j * 8 + 2 * (lane % 4) + e % 2;
            score[j][e] = position < limit[e / 2] ? device::product(score[j][e], scale_log2) : nothing;
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
        running.sum[r] = device::product(running.sum[r], shrink);
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
        const int row = row_of(j * 16 + lane % 16);
        DDTREE_UNROLL
        for (int d = 0; d < kHeadDim / 16; ++d) {
            uint32_t b[4];
            device::load_matrices_transposed(b, values + chunk_offset<kHeadDim>(row, d * 2 + lane / 16));
            device::multiply_add<kType>(running.out[2 * d], p, b[0], b[1]);
            device::multiply_add<kType>(running.out[2 * d + 1], p, b[2], b[3]);
        }
    }
}

// Stores a part of the rows of this lane; -1: of none.
template <int kHeadDim>
__device__ void write_part(const AttentionArgs& args, int pair, int part, const int (&row)[2],
                           const Running<kHeadDim>& running) {
    const int lane = threadIdx.x % kWarp;
    DDTREE_UNROLL
    for (int r = 0; r < 2; ++r) {
        if (row[r] < 0) {
            continue;
        }
        const int64_t at = (static_cast<int64_t>(pair) * args.plan.parts + part) * args.plan.rows + row[r];
        float* const out = args.partial_out + at * kHeadDim + 2 * (lane % 4);
        DDTREE_UNROLL
        for (int d = 0; d < kHeadDim / 8; ++d) {
            *reinterpret_cast<Float2*>(out + d * 8) = {{running.out[d][2 * r], running.out[d][2 * r + 1]}};
        }
        if (lane % 4 == 0) {
            reinterpret_cast<Float2*>(args.partial_sum)[at] = {{running.largest[r], running.sum[r]}};
        }
    }
}

// The fold of a warp's units so far, where a block folds them: each thread's own column of shared memory.
template <int kHeadDim, int kThreads>
struct Folded {
    static constexpr int kLargest = kHeadDim / 2, kSum = kLargest + 2;
    float* column;

    __device__ explicit Folded(unsigned char* tiles)
        : column(reinterpret_cast<float*>(tiles + 2 * stage_bytes<kHeadDim>()) + threadIdx.x) {}
    __device__ float& at(int i) const { return column[i * kThreads]; }
    __device__ void set(const Running<kHeadDim>& to) const {
        DDTREE_UNROLL
        for (int i = 0; i < kLargest; ++i) {
            at(i) = to.out[i / 4][i % 4];
        }
        DDTREE_UNROLL
        for (int r = 0; r < 2; ++r) {
            at(kLargest + r) = to.largest[r];
            at(kSum + r) = to.sum[r];
        }
    }
    // Of what is folded and a closed unit behind it.
    __device__ void fold_into(Running<kHeadDim>& unit) const {
        DDTREE_UNROLL
        for (int r = 0; r < 2; ++r) {
            const Fold fold(at(kLargest + r), unit.largest[r]);
            unit.largest[r] = fold.largest;
            unit.sum[r] = fold(at(kSum + r), unit.sum[r]);
            DDTREE_UNROLL
            for (int d = 0; d < kHeadDim / 8; ++d) {
                DDTREE_UNROLL
                for (int e = 2 * r; e < 2 * r + 2; ++e) {
                    unit.out[d][e] = fold(at(d * 4 + e), unit.out[d][e]);
                }
            }
        }
    }
};

// Ends a unit: stores it, or adds it to what is folded, and begins the next. `last`: there is none.
template <int kHeadDim, int kThreads>
__device__ void end_unit(const AttentionArgs& args, int pair, int unit, bool last, const int (&row)[2],
                         const Folded<kHeadDim, kThreads>& folded, Running<kHeadDim>& running) {
    running.close();
    if (args.plan.folds) {
        folded.fold_into(running);
        if (!last) {
            folded.set(running);
        }
    }
    if (!args.plan.folds || last) {
        write_part(args, pair, args.plan.folds ? 0 : unit, row, running);
    }
    running.clear();
}

// The heads of a block's rows: every args.sharing-th unit of their keys.
template <ElementType kType, int kHeadDim, int kWarps>
__device__ void attend_heads(const AttentionArgs& args, int block, unsigned char* shared) {
    constexpr int kThreads = kWarp * kWarps;
    constexpr int kStage = stage_bytes<kHeadDim>();
    const TreeAttention& a = args.call;
    const AttentionPlan& plan = args.plan;
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int group = a.q_heads / a.kv_heads;
    const int row_tile = block % plan.row_tiles;
    const int pair = block / plan.row_tiles / args.sharing;
    const Place place = make_place(a, pair);
    int key = block / plan.row_tiles % args.sharing * kUnitKeys;

    const int last_row = smaller((row_tile + 1) * kWarpRows * kWarps, plan.rows) - 1;
    const bool all = a.mask_mode == MaskMode::none;
    if (key >= (all ? place.past + a.tokens : head_end(place.past + last_row / group))) {
        return;
    }
    unsigned char* const tiles = shared + kControlBytes;
    const auto load_tile = [&](int at, int stage) {
        unsigned char* const keys = tiles + stage * kStage;
        if (at + kTileKeys <= place.past) {
            load_committed<kHeadDim, kThreads>(a, place, at, keys, keys + kStage / 2);
            return;
        }
        load<kHeadDim, kThreads>(
            a, place, threadIdx.x, at, kTileKeys, place.past + a.tokens, [](int fresh) { return fresh; }, keys,
            keys + kStage / 2);
    };
    load_tile(key, 0);
    device::copy_commit();

    int row[2], limit[2];
    int64_t query[2];
    DDTREE_UNROLL
    for (int r = 0; r < 2; ++r) {
        row[r] = row_tile * kWarpRows * kWarps + warp * kWarpRows + lane / 4 + 8 * r;
        const bool valid = row[r] < plan.rows;
        const int token = row[r] / group;
        limit[r] = valid ? head_limit(args, place, token) : 0;
        query[r] =
            valid ? (static_cast<int64_t>(place.n) * a.tokens + token) * a.q_heads + place.head * group + row[r] % group
                  : -1;
    }
    uint32_t q[kHeadDim / 16][4];
    read_queries<kHeadDim>(a, query, q);
    int* const ends = reinterpret_cast<Control*>(shared)->of_warp;
    const int warp_end = static_cast<int>(device::warp_max(static_cast<uint32_t>(larger(limit[0], limit[1]))));
    if (lane == 0) {
        ends[warp] = warp_end;
    }
    device::sync_block();
    int end = ends[0];
    DDTREE_UNROLL
    for (int w = 1; w < kWarps; ++w) {
        end = larger(end, ends[w]);
    }

    Running<kHeadDim> running;
    running.clear();
    const Folded<kHeadDim, kThreads> folded(tiles);
    if (plan.folds) {
        folded.set(running);
    }
    const auto row_of = [](int i) { return i; };
    for (int stage = 0; key < end; stage ^= 1) {
        const bool unit_ends = (key + kTileKeys) % kUnitKeys == 0 || key + kTileKeys >= end;
        const int next = key + kTileKeys + (unit_ends ? (args.sharing - 1) * kUnitKeys : 0);
        if (next < end) {
            load_tile(next, stage ^ 1);
        }
        device::copy_commit();  // empty after the last tile, so that the count below stays right
        device::copy_wait<1>();
        device::sync_block();
        if (key < warp_end) {
            const unsigned char* const keys = tiles + stage * kStage;
            attend_tile<kType, kHeadDim, kTileKeys>(q, limit, key, keys, keys + kStage / 2, row_of, args.scale_log2,
                                                    running);
        }
        if (unit_ends) {
            const int unit = key / kUnitKeys;
            // Of a row that sees none of the keys, another block may write this part.
            const int from = plan.folds ? 0 : unit * kUnitKeys;
            const int seeing[2] = {from < limit[0] ? row[0] : -1, from < limit[1] ? row[1] : -1};
            end_unit(args, pair, unit, next >= end, seeing, folded, running);
        }
        device::sync_block();
        key = next;
    }
    device::copy_wait<0>();
}

// The tails of a block's tokens, a warp each, and the tokens' new rows into the cache.
template <ElementType kType, int kHeadDim, int kWarps>
__device__ void attend_tails(const AttentionArgs& args, int block, unsigned char* shared) {
    constexpr int kThreads = kWarp * kWarps;
    constexpr int kChunks = kHeadDim / 8;
    constexpr int kSide = side_rows(kWarps);
    const TreeAttention& a = args.call;
    const AttentionPlan& plan = args.plan;
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int group = a.q_heads / a.kv_heads;
    const int blocks = ceil_div(plan.tails, kWarps);
    const int pair = block / blocks;
    const Place place = make_place(a, pair);
    const int tail0 = block % blocks * kWarps;
    const int here = smaller(kWarps, plan.tails - tail0);

    for (int i = threadIdx.x; i < here * kChunks; i += kThreads) {
        const int tail = tail0 + i / kChunks, token = tail / plan.head_tiles;
        if (tail % plan.head_tiles == 0) {
            const int64_t row = (static_cast<int64_t>(place.n) * a.tokens + token) * a.kv_heads + place.head;
            const int64_t from = row * kChunks + i % kChunks;
            const int64_t to = (place.cache_row0 + place.past + token) * kChunks + i % kChunks;
            static_cast<Bytes16*>(a.present_k)[to] = static_cast<const Bytes16*>(a.k)[from];
            static_cast<Bytes16*>(a.present_v)[to] = static_cast<const Bytes16*>(a.v)[from];
        }
    }
    if (a.mask_mode == MaskMode::none) {
        return;
    }

    // A warp without a token repeats the last one's work and stores none of it.
    const auto token_of = [&](int w) { return (tail0 + smaller(w, here - 1)) / plan.head_tiles; };
    Control& control = *reinterpret_cast<Control*>(shared);
    const int token = token_of(warp);
    const int seen = tokens_seen(a, place.n, token);
    if (lane == 0) {
        control.of_warp[warp] = seen;
    }
    if (lane < smaller(seen, kOwnRows)) {
        control.path[warp][lane] = token_seen(a, place.n, token, lane);
    }
    device::sync_block();
    bool plain = true;  // all rows that the block's tokens see lie at their positions
    for (int w = 0; w < kWarps; ++w) {
        plain = plain && control.of_warp[w] == token_of(w) + 1;
    }

    const int position = place.past + seen - 1;
    const int end = head_end(position);
    const int side0 = head_end(place.past + (plain ? token_of(0) : -1));
    const int side_end = place.past + (plain ? token_of(kWarps - 1) + 1 : 0);
    const bool gathers = !plain && seen <= kOwnRows;
    unsigned char* const keys = shared + kControlBytes;
    unsigned char* const values = keys + (kSide + kWarps * kOwnRows) * kHeadDim * 2;
    load<kHeadDim, kThreads>(
        a, place, threadIdx.x, side0, side_end - side0, side_end, [](int fresh) { return fresh; }, keys, values);
    const int own0 = kSide + warp * kOwnRows;
    const int* const path = control.path[warp];
    load<kHeadDim, kWarp>(
        a, place, lane, place.past, kOwnRows, gathers ? place.past + seen : 0, [&](int fresh) { return path[fresh]; },
        keys, values, own0);
    device::copy_commit();

    int row[2];
    int64_t query[2];
    DDTREE_UNROLL
    for (int r = 0; r < 2; ++r) {
        const int of_group = (tail0 + warp) % plan.head_tiles * kWarpRows + lane / 4 + 8 * r;
        const bool valid = warp < here && of_group < group;
        row[r] = valid ? token * group + of_group : -1;
        query[r] =
            valid ? (static_cast<int64_t>(place.n) * a.tokens + token) * a.q_heads + place.head * group + of_group : -1;
    }
    uint32_t q[kHeadDim / 16][4];
    read_queries<kHeadDim>(a, query, q);
    device::copy_wait<0>();
    device::sync_block();

    const int limit[2] = {position + 1, position + 1};
    Running<kHeadDim> running;
    running.clear();
    if (plain || gathers) {
        // The rows side by side, then the warp's own, of which those that it does not see are zeros.
        const auto row_of = [&](int i) {
            return end + i < side_end ? end + i - side0 : own0 + smaller(end + i - side_end, kOwnRows - 1);
        };
        attend_tile<kType, kHeadDim, kTileKeys>(q, limit, end, keys, values, row_of, args.scale_log2, running);
        if (end + kTileKeys <= position) {
            attend_tile<kType, kHeadDim, kMargin>(
                q, limit, end + kTileKeys, keys, values, [&](int i) { return row_of(kTileKeys + i); }, args.scale_log2,
                running);
        }
        running.close();
        write_part(args, pair, plan.parts - 1, row, running);
    }
    if (plain) {
        return;
    }
    for (int w = 0; w < here; ++w) {  // tokens that see more new rows than a warp gathers
        const int its_token = token_of(w), its_seen = control.of_warp[w];
        if (its_seen <= kOwnRows) {
            continue;
        }
        const int its_end = head_end(place.past + its_seen - 1);
        const Folded<kHeadDim, kThreads> folded(keys);
        device::sync_block();  // what is there has been read
        running.clear();
        if (plan.folds && warp == w) {
            folded.set(running);
        }
        unsigned char* const tile_values = keys + stage_bytes<kHeadDim>() / 2;
        int key = is_deep(its_token, its_seen) ? gathered_from(plan, place.past) : its_end;
        for (; key < place.past + its_seen; key += kTileKeys) {
            device::sync_block();
            load<kHeadDim, kThreads>(
                a, place, threadIdx.x, key, kTileKeys, place.past + its_seen,
                [&](int fresh) { return token_seen(a, place.n, its_token, fresh); }, keys, tile_values);
            device::copy_commit();
            device::copy_wait<0>();
            device::sync_block();
            if (warp == w) {
                attend_tile<kType, kHeadDim, kTileKeys>(
                    q, limit, key, keys, tile_values, [](int i) { return i; }, args.scale_log2, running);
                const int next = key + kTileKeys;
                if (key < its_end && (next % kUnitKeys == 0 || next == its_end)) {
                    end_unit(args, pair, key / kUnitKeys, next == its_end, row, folded, running);
                }
            }
        }
        if (warp == w) {
            running.close();
            write_part(args, pair, plan.parts - 1, row, running);
        }
    }
}

template <ElementType kType, int kHeadDim, int kWarps>
__global__ void __launch_bounds__(kWarp* kWarps, kWarps == 1 ? 3 : 2) attend(const AttentionArgs args) {
    device::wait_and_trigger();
    DDTREE_DYNAMIC_SHARED(shared);
    const int block = static_cast<int>(blockIdx.x);
    if (block < args.head_blocks) {
        attend_heads<kType, kHeadDim, kWarps>(args, block, shared);
    } else {
        attend_tails<kType, kHeadDim, kWarps>(args, block - args.head_blocks, shared);
    }
}

}  // namespace

}  // namespace ddtree
