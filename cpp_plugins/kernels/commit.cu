// The accepted path: the walk, and compaction of the cache in place, all layers, keys and values, of every sequence in
// one launch.

#include "common.cuh"
#include "ddtree/round.h"

namespace ddtree {

namespace {

constexpr int kCompactThreads = 128;
// Rows read before any of them is written: their latencies overlap. Still in place, because a batch writes rows up to
// j + kBatch - 1 and every later read is at keep[j + kBatch] >= j + kBatch or beyond.
constexpr int kBatch = 8;

// Moves the rows `keep` of one 16-byte column, which begins at `base` and has `rows`, to its front in rising order: no
// scratch, no race where one thread owns the column.
__device__ void move_rows(Bytes16* base, int64_t stride, const int32_t* keep, int count, int rows) {
    int before = -1;
    bool valid = true;
    for (int first = 0; valid && first < count; first += kBatch) {
        Bytes16 row[kBatch];
        int from[kBatch];
        DDTREE_UNROLL
        for (int j = 0; j < kBatch; ++j) {
            from[j] = -1;
            if (valid && first + j < count) {
                const int kept = keep[first + j];
                valid = kept > before && kept < rows;
                if (valid) {
                    before = from[j] = kept;
                    row[j] = base[kept * stride];
                }
            }
        }
        DDTREE_UNROLL
        for (int j = 0; j < kBatch; ++j) {
            if (from[j] > first + j) {
                base[(first + j) * stride] = row[j];
            }
        }
    }
}

// The same in the cache [planes, slots, kv_heads, capacity, row_bytes], of a column of all heads', behind `start` rows.
template <typename Call>
__device__ void move_column(const Call& a, int plane, int slot, int64_t column, int start, const int32_t* keep,
                            int count) {
    const int columns = a.row_bytes / 16;
    const int64_t head = (static_cast<int64_t>(plane) * a.slots + slot) * a.kv_heads + column / columns;
    Bytes16* base = static_cast<Bytes16*>(a.cache) + (head * a.capacity + start) * columns + column % columns;
    move_rows(base, columns, keep, count, a.capacity - start);
}

__global__ void __launch_bounds__(kCompactThreads) compact(const KvCompact a) {
    device::wait_and_trigger();
    const int64_t column = static_cast<int64_t>(blockIdx.x) * kCompactThreads + threadIdx.x;
    if (column >= static_cast<int64_t>(a.kv_heads) * (a.row_bytes / 16)) {
        return;
    }
    const int n = blockIdx.z;
    const int count = a.keep_count == nullptr ? a.max_keep : clamped(a.keep_count[n], 0, a.max_keep);
    move_column(a, static_cast<int>(blockIdx.y), clamped(a.slot_ids[n], 0, a.slots - 1), column,
                clamped(a.past_len[n], 0, a.capacity), a.keep + static_cast<int64_t>(n) * a.max_keep, count);
}

// The accepted path into `path` [longest]; its length, and the node it ends at is its last. One warp. Children follow
// their parents, so one forward scan, 32 nodes at a time, visits every child of the current node.
__device__ int follow(const RoundCommit& a, int n, int32_t* path) {
    const int lane = static_cast<int>(threadIdx.x);
    const int64_t row = static_cast<int64_t>(n) * a.tokens;
    const int count = clamped(a.counts[n], 1, a.tokens);
    int node = 0;
    int length = 1;
    int32_t wanted = a.choices[row];
    if (lane == 0) {
        path[0] = 0;
    }
    for (int first = 0; first < count; first += kWarp) {
        const int candidate = first + lane;
        const bool inside = candidate > 0 && candidate < count;
        const int parent = inside ? a.parents[row + candidate] : -1;
        const int32_t token = inside ? a.token_ids[row + candidate] : 0;
        while (length < a.longest) {
            const uint32_t hits = device::ballot(inside && candidate > node && parent == node && token == wanted);
            if (hits == 0) {
                break;
            }
            node = first + device::first_bit(hits);
            wanted = a.choices[row + node];
            if (lane == 0) {
                path[length] = node;
            }
            ++length;
        }
    }
    return length;
}

// What the host is told, and the slot's next state.
__device__ void report(const RoundCommit& a, int n, int slot, const int32_t* path, int length) {
    const int t = a.tokens, m = a.longest, o = a.outlook, thread = static_cast<int>(threadIdx.x);
    const int64_t row = static_cast<int64_t>(n) * t, seen = static_cast<int64_t>(n) * o;
    int32_t* result = a.result + n * (2 + 2 * static_cast<int64_t>(m + t + o));
    for (int i = thread; i < m; i += kCompactThreads) {
        result[2 + i] = a.choices[row + (i < length ? path[i] : 0)];
        result[2 + m + i] = i < length ? path[i] : -1;
    }
    result += 2 + 2 * m;
    for (int i = thread; i < t; i += kCompactThreads) {
        result[i] = a.token_ids[row + i];
        result[t + i] = a.parents[row + i];
    }
    const auto* weights = reinterpret_cast<const int32_t*>(a.log_weights);
    for (int i = thread; i < o; i += kCompactThreads) {
        result[2 * t + i] = weights[seen + i];
        result[2 * t + o + i] = a.outlook_depths[seen + i];
    }
    if (thread == 0) {
        result -= 2 + 2 * m;
        result[0] = a.counts[n];
        result[1] = length;
        int32_t state[4];
        for (int i = 0; i < 4; ++i) {
            state[i] = a.before[i * a.sequences + n];
        }
        if (a.active[n] != 0) {
            const auto added = static_cast<uint32_t>(length);
            state[0] = static_cast<int32_t>(static_cast<uint32_t>(state[0]) + added);
            state[2] = static_cast<int32_t>(static_cast<uint32_t>(state[2]) + (a.holds[n] != 0 ? added : 0));
            state[3] = a.choices[row + path[length - 1]];
        }
        for (int i = 0; i < 4; ++i) {
            a.states[i * a.slots + slot] = state[i];
        }
    }
}

// Every block walks the tree by itself, which takes less time than a launch between. The first block of a sequence
// reports, the next ones keep tapped states, the others move rows of the cache, a column of 16 bytes by thread each.
__global__ void __launch_bounds__(kCompactThreads) commit(const RoundCommit a) {
    device::wait_and_trigger();
    DDTREE_DYNAMIC_SHARED(shared);
    auto* path = reinterpret_cast<int32_t*>(shared);  // [m + 1], the length last
    const int n = blockIdx.y, thread = static_cast<int>(threadIdx.x);
    if (thread < kWarp) {
        const int length = follow(a, n, path);
        if (thread == 0) {
            path[a.longest] = length;
        }
    }
    device::sync_block();
    const int length = path[a.longest], slot = clamped(a.slot_ids[n], 0, a.slots - 1);
    int block = static_cast<int>(blockIdx.x);
    if (block-- == 0) {
        report(a, n, slot, path, length);
        return;
    }
    const int width = a.state_bytes / 16, holding = ceil_div(width, kCompactThreads);
    if (block < holding) {
        const int column = block * kCompactThreads + thread;
        if (column < width && a.holds[n] != 0) {
            const auto* from = static_cast<const Bytes16*>(a.tapped) + static_cast<int64_t>(n) * a.tokens * width;
            auto* to = static_cast<Bytes16*>(a.waiting) + static_cast<int64_t>(slot) * a.waiting_rows * width;
            const int waiting = clamped(a.before[2 * a.sequences + n], 0, a.waiting_rows);
            const int count = smaller(length, a.waiting_rows - waiting);
            for (int first = 0; first < count; first += kBatch) {
                Bytes16 row[kBatch];
                DDTREE_UNROLL
                for (int j = 0; j < kBatch; ++j) {
                    if (first + j < count) {
                        row[j] = from[static_cast<int64_t>(path[first + j]) * width + column];
                    }
                }
                DDTREE_UNROLL
                for (int j = 0; j < kBatch; ++j) {
                    if (first + j < count) {
                        to[static_cast<int64_t>(waiting + first + j) * width + column] = row[j];
                    }
                }
            }
        }
        return;
    }
    block -= holding;
    const int columns = a.kv_heads * (a.row_bytes / 16), blocks = ceil_div(columns, kCompactThreads);
    const int column = block % blocks * kCompactThreads + thread;
    if (column < columns) {
        move_column(a, block / blocks, slot, column, clamped(a.before[n], 0, a.capacity), path, length);
    }
}

}  // namespace

Status device_compact(const KvCompact& call, Stream stream) {
    if (call.sequences < 0 || call.planes < 0 || call.slots < 1 || call.kv_heads < 1 || call.capacity < 1 ||
        call.max_keep < 0 || call.row_bytes < 16 || call.row_bytes % 16 != 0 || call.planes > 65535 ||
        call.sequences > 65535) {
        return Status::bad_shape;
    }
    if (call.sequences == 0 || call.planes == 0 || call.max_keep == 0) {
        return Status::ok;
    }
    if (any_null(call.cache, call.slot_ids, call.past_len, call.keep)) {
        return Status::null_pointer;
    }
    if (!aligned16(call.cache)) {
        return Status::misaligned;
    }
    const int64_t columns = static_cast<int64_t>(call.kv_heads) * (call.row_bytes / 16);
    const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(columns, kCompactThreads)),
                    static_cast<unsigned>(call.planes), static_cast<unsigned>(call.sequences));
    return launch(compact, grid, dim3(kCompactThreads), 0, stream, call);
}

Status device_commit(const RoundCommit& call, Stream stream) {
    if (call.sequences < 0 || call.sequences > 65535 || call.tokens < 1 || call.longest < 1 || call.outlook < 0 ||
        call.planes < 0 || call.planes > 65535 || call.slots < 1 || call.kv_heads < 1 || call.capacity < 1 ||
        call.waiting_rows < 0 || call.row_bytes < 16 || call.row_bytes % 16 != 0 || call.state_bytes < 16 ||
        call.state_bytes % 16 != 0) {
        return Status::bad_shape;
    }
    if (call.sequences == 0) {
        return Status::ok;
    }
    if (any_null(call.parents, call.token_ids, call.choices, call.counts, call.slot_ids, call.holds, call.active,
                 call.before, call.tapped, call.cache, call.waiting, call.states, call.result) ||
        (call.outlook > 0 && any_null(call.log_weights, call.outlook_depths))) {
        return Status::null_pointer;
    }
    if (!aligned16(call.cache) || !aligned16(call.tapped) || !aligned16(call.waiting)) {
        return Status::misaligned;
    }
    const int64_t moving = call.planes * ceil_div<int64_t>(call.kv_heads * (call.row_bytes / 16), kCompactThreads);
    const int64_t blocks = 1 + ceil_div(call.state_bytes / 16, kCompactThreads) + moving;
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(call.sequences));
    return launch(commit, grid, dim3(kCompactThreads), (call.longest + 1) * sizeof(int32_t), stream, call);
}

}  // namespace ddtree
