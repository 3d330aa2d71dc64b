#include "ddtree/kv.h"

#include <cstring>

namespace ddtree {

namespace {

void compact_head(unsigned char* rows, int64_t row_bytes, const int32_t* keep, int64_t kept) {
    for (int64_t first = 0; first < kept;) {
        int64_t last = first + 1;
        while (last < kept && keep[last] == keep[last - 1] + 1) {
            ++last;
        }
        if (keep[first] != first) {
            // A run may overlap its own destination, hence memmove.
            std::memmove(rows + first * row_bytes, rows + keep[first] * row_bytes,
                         static_cast<size_t>((last - first) * row_bytes));
        }
        first = last;
    }
}

}  // namespace

void compact_rows(const KvBuffers& buffers, int64_t start, const int32_t* keep, int64_t kept) {
    for (int64_t b = 0; b < buffers.count; ++b) {
        auto* base = reinterpret_cast<unsigned char*>(static_cast<uintptr_t>(buffers.bases[b]));
        for (int64_t head = 0; head < buffers.heads; ++head) {
            compact_head(base + head * buffers.head_stride_bytes + start * buffers.row_bytes, buffers.row_bytes, keep,
                         kept);
        }
    }
}

}  // namespace ddtree
