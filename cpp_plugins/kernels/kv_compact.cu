// Cache compaction in place: all layers, keys and values, of every sequence in one launch.

#include "common.cuh"
#include "ddtree/round.h"

namespace ddtree {

namespace {

constexpr int kCompactThreads = 128;
// Rows read before any of them is written: their latencies overlap. Still in place, because a batch writes rows up to
// j + kBatch - 1 and every later read is at keep[j + kBatch] >= j + kBatch or beyond.
constexpr int kBatch = 8;

// One thread owns one 16-byte column of one (plane, head) and moves its rows in rising order: no scratch, no race.
__global__ void __launch_bounds__(kCompactThreads) compact(const KvCompact a) {
    device::wait_and_trigger();
    const int columns = a.row_bytes / 16;
    const int64_t column = static_cast<int64_t>(blockIdx.x) * kCompactThreads + threadIdx.x;
    if (column >= static_cast<int64_t>(a.kv_heads) * columns) {
        return;
    }
    const int n = blockIdx.z;
    const int slot = clamped(a.slot_ids[n], 0, a.slots - 1);
    const int start = clamped(a.past_len[n], 0, a.capacity);
    const int count = a.keep_count == nullptr ? a.max_keep : clamped(a.keep_count[n], 0, a.max_keep);
    const int rows = a.capacity - start;
    const int32_t* keep = a.keep + static_cast<int64_t>(n) * a.max_keep;

    const int64_t head = (static_cast<int64_t>(blockIdx.y) * a.slots + slot) * a.kv_heads + column / columns;
    Bytes16* base = static_cast<Bytes16*>(a.cache) + (head * a.capacity + start) * columns + column % columns;

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
                    row[j] = base[static_cast<int64_t>(kept) * columns];
                }
            }
        }
        DDTREE_UNROLL
        for (int j = 0; j < kBatch; ++j) {
            if (from[j] > first + j) {
                base[static_cast<int64_t>(first + j) * columns] = row[j];
            }
        }
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

}  // namespace ddtree
