// The K most probable tokens of each drafted position, and the logarithm of the sum that makes logits
// log-probabilities: one block per row, which reads the row once and a small part of it again.
//
// The row is cut into tiles. The K largest logits lie in the K tiles of the largest maxima, of equal maxima the first
// ones, since each of those tiles holds a logit that comes before all of any other tile. The K tiles are found by their
// maxima, and the K logits among those tiles', by the same search of digits; what is found is sorted in shared memory.

#include <cstring>

#include "common.cuh"
#include "ddtree/draft.h"

namespace ddtree {

namespace {

constexpr int kTopThreads = 1024;
constexpr int kTopWarps = kTopThreads / kWarp;
constexpr int kMaxTiles = 2048;
constexpr int kStrip = 128;  // columns that a warp reads at a time; a tile is one or more of them
constexpr int kAhead = 4;    // strips whose loads are under way
constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
constexpr float kLowest = -3.4028234663852886e38f;

// The state of one row, in shared memory; the winners lie behind it.
struct Row {
    uint32_t tile[kMaxTiles];   // `ordered` largest logit
    int32_t chosen[kMaxTiles];  // tiles
    int32_t bins[kDigits];
    float largest[kTopWarps], sum[kTopWarps];
    uint64_t least;
    int32_t taken, wanted, done;
};

// Bits in the order of the values, where NaN is -inf and both zeros are one.
__device__ uint32_t ordered(float value) {
    const float seen = fmaxf(value, -__builtin_huge_valf()) + 0.0f;
    uint32_t bits;
    memcpy(&bits, &seen, sizeof(bits));
    const uint32_t sign = 0x80000000u;
    return bits ^ (bits & sign ? ~0u : sign);
}
// Distinct numbers in the order of the candidates, the last one lowest; none is 0.
__device__ uint64_t key(uint32_t value, int id) { return uint64_t{value} << 32 | ~static_cast<uint32_t>(id); }
__device__ int id_of(uint64_t key) { return static_cast<int>(~static_cast<uint32_t>(key)); }

// The sum of exp(x) as exp(largest) * sum.
struct Exponentials {
    float largest = kLowest;
    float sum = 0.0f;

    __device__ void raise(float to) {
        sum *= device::exp2_fast((largest - to) * kLog2E);
        largest = to;
    }
    __device__ void add(Exponentials other) {
        raise(fmaxf(largest, other.largest));
        other.raise(largest);
        sum += other.sum;
    }
};

// The largest logit of each tile into `row.tile`, which is 0, and the exponentials of this thread's logits.
__device__ Exponentials read(const float* logits, int columns, int strips_per_tile, Row& row, int warp, int lane) {
    constexpr int kEach = kStrip / kWarp;
    const int strips = ceil_div(columns, kStrip);
    Exponentials mine;
    for (int first = warp; first < strips; first += kTopWarps * kAhead) {
        float x[kAhead][kEach];
        DDTREE_UNROLL
        for (int s = 0; s < kAhead; ++s) {
            DDTREE_UNROLL
            for (int e = 0; e < kEach; ++e) {
                const int column = (first + s * kTopWarps) * kStrip + e * kWarp + lane;
                x[s][e] = column < columns ? logits[column] : -__builtin_huge_valf();
            }
        }
        float largest = mine.largest;
        DDTREE_UNROLL
        for (int s = 0; s < kAhead; ++s) {
            float strip = x[s][0];
            DDTREE_UNROLL
            for (int e = 1; e < kEach; ++e) {
                strip = fmaxf(strip, x[s][e]);
            }
            largest = fmaxf(largest, strip);
            const uint32_t most = device::warp_max(ordered(strip));
            if (lane == 0 && first + s * kTopWarps < strips) {
                device::atomic_max(&row.tile[(first + s * kTopWarps) / strips_per_tile], most);
            }
        }
        mine.raise(largest);
        DDTREE_UNROLL
        for (int s = 0; s < kAhead; ++s) {
            DDTREE_UNROLL
            for (int e = 0; e < kEach; ++e) {
                mine.sum += device::exp2_fast((x[s][e] - largest) * kLog2E);
            }
        }
    }
    return mine;
}

// The logarithm of the sum over the block.
__device__ float log_sum(Exponentials mine, Row& row, int warp, int lane) {
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
        mine.add({device::shuffle_xor(mine.largest, lanes), device::shuffle_xor(mine.sum, lanes)});
    }
    if (lane == 0) {
        row.largest[warp] = mine.largest;
        row.sum[warp] = mine.sum;
    }
    device::sync_block();
    Exponentials all;
    for (int w = 0; w < kTopWarps; ++w) {
        all.add({row.largest[w], row.sum[w]});
    }
    return all.largest + logf(all.sum);
}

// Calls found(key) for the `wanted` largest of the distinct keys key_at(0 … count - 1), in any order; 0 is no key, and
// there are enough others. Digit by digit from the top, until no key of the last digit's bin is left out.
template <typename KeyAt, typename Found>
__device__ void pick(Row& row, int count, int wanted, KeyAt key_at, Found found) {
    const int thread = static_cast<int>(threadIdx.x);
    uint64_t least = 0;
    int shift = 64;
    for (bool done = false; !done;) {
        shift -= kDigitBits;
        for (int i = thread; i < kDigits; i += kTopThreads) {
            row.bins[i] = 0;
        }
        device::sync_block();
        for (int i = thread; i < count; i += kTopThreads) {
            const uint64_t key = key_at(i);
            if (key != 0 && key >> shift >> kDigitBits == least) {
                device::atomic_add(&row.bins[key >> shift & (kDigits - 1)], 1);
            }
        }
        device::sync_block();
        if (thread < kWarp) {
            // Lane 0 has the highest digits. The lane in whose digits the last of the wanted keys lies finds which.
            constexpr int kEach = kDigits / kWarp;
            const int top = kDigits - 1 - thread * kEach;
            int keys = 0;
            for (int i = 0; i < kEach; ++i) {
                keys += row.bins[top - i];
            }
            int until = keys;  // of this lane and those before it
            for (int lanes = 1; lanes < kWarp; lanes *= 2) {
                const int before = device::shuffle(until, larger(thread - lanes, 0));
                until += thread >= lanes ? before : 0;
            }
            if (until - keys < wanted && wanted <= until) {
                int left = wanted - (until - keys);
                int digit = top;
                for (; row.bins[digit] < left; --digit) {
                    left -= row.bins[digit];
                }
                row.least = least << kDigitBits | static_cast<uint64_t>(digit);
                row.wanted = left;
                row.done = left == row.bins[digit];
            }
        }
        device::sync_block();
        least = row.least;
        wanted = row.wanted;
        done = row.done != 0;
    }
    for (int i = thread; i < count; i += kTopThreads) {
        const uint64_t key = key_at(i);
        if (key != 0 && key >> shift >= least) {
            found(key);
        }
    }
    device::sync_block();
}

// Falling, in place; `size` is a power of two.
__device__ void sort(uint64_t* keys, int size) {
    for (int width = 2; width <= size; width *= 2) {
        for (int apart = width / 2; apart > 0; apart /= 2) {
            device::sync_block();
            for (int i = static_cast<int>(threadIdx.x); i < size / 2; i += kTopThreads) {
                const int low = 2 * i - (i & (apart - 1));
                const uint64_t a = keys[low], b = keys[low + apart];
                if ((low & width) == 0 ? a < b : a > b) {
                    keys[low] = b;
                    keys[low + apart] = a;
                }
            }
        }
    }
    device::sync_block();
}

__host__ __device__ int power_of_two(int least) {
    int size = 1;
    while (size < least) {
        size *= 2;
    }
    return size;
}

__global__ void __launch_bounds__(kTopThreads) top(const DraftTop a) {
    device::wait_and_trigger();
    DDTREE_DYNAMIC_SHARED(shared);
    Row& row = *reinterpret_cast<Row*>(shared);
    auto* winners = reinterpret_cast<uint64_t*>(shared + sizeof(Row));
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / kWarp, lane = thread % kWarp;
    const float* logits = a.logits + static_cast<int64_t>(blockIdx.x) * a.vocabulary;
    const int strips_per_tile = power_of_two(ceil_div(ceil_div(a.vocabulary, kStrip), kMaxTiles));
    const int width = kStrip * strips_per_tile;
    const int tiles = ceil_div(a.vocabulary, width);
    const int k = a.candidates_k;

    for (int i = thread; i < tiles; i += kTopThreads) {
        row.tile[i] = 0;
        row.chosen[i] = i;
    }
    const int size = power_of_two(k);
    for (int i = thread; i < size; i += kTopThreads) {
        winners[i] = 0;
    }
    if (thread == 0) {
        row.taken = 0;
    }
    device::sync_block();
    const float normaliser = log_sum(read(logits, a.vocabulary, strips_per_tile, row, warp, lane), row, warp, lane);

    if (k < tiles) {
        pick(
            row, tiles, k, [&](int i) { return key(row.tile[i], i); },
            [&](uint64_t found) { row.chosen[device::atomic_add(&row.taken, 1)] = id_of(found); });
        if (thread == 0) {
            row.taken = 0;
        }
        device::sync_block();
    }
    pick(
        row, smaller(k, tiles) * width, k,
        [&](int i) {
            const int column = row.chosen[i / width] * width + i % width;
            return column < a.vocabulary ? key(ordered(logits[column]), column) : 0;
        },
        [&](uint64_t found) { winners[device::atomic_add(&row.taken, 1)] = found; });
    sort(winners, size);
    const int64_t out = static_cast<int64_t>(blockIdx.x) * k;
    for (int i = thread; i < k; i += kTopThreads) {
        const int id = id_of(winners[i]);
        a.best[out + i] = a.normalised != 0 ? logits[id] - normaliser : logits[id];
        a.ids[out + i] = id;
    }
}

}  // namespace

Status draft_top(const DraftTop& call, Stream stream) {
    if (call.rows < 0 || call.candidates_k < 1 || call.candidates_k > kMaxCandidates ||
        call.vocabulary < call.candidates_k || call.vocabulary > 1 << 30) {
        return Status::bad_shape;
    }
    if (call.rows == 0) {
        return Status::ok;
    }
    if (any_null(call.logits, call.best, call.ids)) {
        return Status::null_pointer;
    }
    const size_t winners = static_cast<size_t>(power_of_two(call.candidates_k)) * sizeof(uint64_t);
    return launch(top, dim3(static_cast<unsigned>(call.rows)), dim3(kTopThreads), sizeof(Row) + winners, stream, call);
}

}  // namespace ddtree
