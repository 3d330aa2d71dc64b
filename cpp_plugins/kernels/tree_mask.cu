// The packed ancestor mask.

#include "common.cuh"
#include "ddtree/round.h"

namespace ddtree {

namespace {

constexpr int kMaskThreads = 128;

// One thread makes one word: it climbs from its row's node and keeps the ancestors that fall into the word. Rows do not
// wait for their parents' rows, so no order among threads is needed.
__global__ void __launch_bounds__(kMaskThreads) pack_mask(const PackedMask a) {
    device::wait_and_trigger();
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kMaskThreads + threadIdx.x;
    if (index >= static_cast<int64_t>(a.tokens) * a.mask_words) {
        return;
    }
    const int row = static_cast<int>(index / a.mask_words);
    const int word = static_cast<int>(index % a.mask_words);
    const int32_t* parents = a.parents + static_cast<int64_t>(blockIdx.y) * a.tokens;
    uint32_t bits = 0;
    for (int node = row; node >= 0;) {
        if (node / 32 == word) {
            bits |= 1u << (node % 32);
        }
        const int parent = parents[node];
        node = parent < node ? parent : -1;
    }
    a.mask[(static_cast<int64_t>(blockIdx.y) * a.tokens + row) * a.mask_words + word] = static_cast<int32_t>(bits);
}

}  // namespace

Status device_packed_mask(const PackedMask& call, Stream stream) {
    if (call.sequences < 0 || call.sequences > 65535 || call.tokens < 0 ||
        call.mask_words < ceil_div(call.tokens, 32)) {
        return Status::bad_shape;
    }
    if (call.sequences == 0 || call.tokens == 0) {
        return Status::ok;
    }
    if (any_null(call.parents, call.mask)) {
        return Status::null_pointer;
    }
    const int64_t words = static_cast<int64_t>(call.tokens) * call.mask_words;
    const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(words, kMaskThreads)),
                    static_cast<unsigned>(call.sequences));
    return launch(pack_mask, grid, dim3(kMaskThreads), 0, stream, call);
}

}  // namespace ddtree
