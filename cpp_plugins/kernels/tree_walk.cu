// The packed ancestor mask and the greedy walk.

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

// Children follow their parents, so one forward scan, 32 nodes at a time, visits every child of the current node.
__global__ void __launch_bounds__(kWarp) walk(const TreeWalk a) {
    device::wait_and_trigger();
    const int n = blockIdx.x;
    const int lane = threadIdx.x;
    const int64_t row = static_cast<int64_t>(n) * a.tokens;
    const int count = a.counts == nullptr ? a.tokens : clamped(a.counts[n], 1, a.tokens);

    int node = 0;
    int length = 1;
    int32_t wanted = a.choices[row];
    if (lane == 0) {
        a.path[row] = 0;
    }
    for (int first = 0; first < count; first += kWarp) {
        const int candidate = first + lane;
        const bool inside = candidate > 0 && candidate < count;
        const int parent = inside ? a.parents[row + candidate] : -1;
        const int32_t token = inside ? a.token_ids[row + candidate] : 0;
        while (true) {
            const uint32_t hits = device::ballot(inside && candidate > node && parent == node && token == wanted);
            if (hits == 0) {
                break;
            }
            node = first + device::first_bit(hits);
            wanted = a.choices[row + node];
            if (lane == 0) {
                a.path[row + length] = node;
            }
            ++length;
        }
    }
    for (int i = length + lane; i < a.tokens; i += kWarp) {
        a.path[row + i] = -1;
    }
    if (lane == 0) {
        a.lengths[n] = length;
        a.next_tokens[n] = wanted;
        if (a.next_past_len != nullptr) {
            a.next_past_len[n] =
                static_cast<int32_t>(static_cast<uint32_t>(a.past_len[n]) + static_cast<uint32_t>(length));
        }
    }
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

Status device_walk(const TreeWalk& call, Stream stream) {
    if (call.sequences < 0 || call.tokens < 1) {
        return Status::bad_shape;
    }
    if (call.sequences == 0) {
        return Status::ok;
    }
    if (any_null(call.parents, call.token_ids, call.choices, call.path, call.lengths, call.next_tokens) ||
        (call.next_past_len != nullptr && call.past_len == nullptr)) {
        return Status::null_pointer;
    }
    return launch(walk, dim3(static_cast<unsigned>(call.sequences)), dim3(kWarp), 0, stream, call);
}

}  // namespace ddtree
