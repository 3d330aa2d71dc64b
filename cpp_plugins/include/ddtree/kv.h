// Row compaction of the KV cache on the host, the stage `commit`.
#pragma once

#include <cstdint>

namespace ddtree {

// P buffers of Hkv heads of S rows: bases [P] are their addresses, a head starts head_stride_bytes after the one
// before it, and its rows lie row_bytes apart.
struct KvBuffers {
    const uint64_t* bases;
    int64_t count;
    int64_t heads;
    int64_t head_stride_bytes;
    int64_t row_bytes;
};

// In place, in every buffer and head: row start + keep[j] becomes row start + j. keep [m] must be strictly increasing
// and not negative, which makes keep[j] >= j: moving in rising order then never overwrites a row still to be read.
void compact_rows(const KvBuffers& buffers, int64_t start, const int32_t* keep, int64_t kept);

}  // namespace ddtree
