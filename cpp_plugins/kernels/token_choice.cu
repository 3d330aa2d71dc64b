// The target's token after each node: one block per row of logits, which reads it once.

#include "common.cuh"
#include "ddtree/noise.h"
#include "ddtree/round.h"

namespace ddtree {

namespace {

constexpr int kChoiceThreads = 512;
constexpr int kChoiceWarps = kChoiceThreads / kWarp;

// The best token so far: the largest value, then the lowest id.
struct Best {
    double value = -__builtin_huge_val();
    int32_t id = 0x7fffffff;

    __device__ void offer(double other, int32_t token) {
        if (other > value || (other == value && token < id)) {
            value = other;
            id = token;
        }
    }
};

__global__ void __launch_bounds__(kChoiceThreads) choose(const TokenChoice a) {
    device::wait_and_trigger();
    DDTREE_DYNAMIC_SHARED(shared);
    auto* bests = reinterpret_cast<Best*>(shared);
    const int thread = static_cast<int>(threadIdx.x);
    const auto row = static_cast<int64_t>(blockIdx.x);
    const float* logits = a.logits + row * a.vocabulary;
    const auto n = row / a.tokens;
    const double temperature = a.temperatures[n];
    const uint64_t state = noise_state(static_cast<uint64_t>(a.seeds[n]), static_cast<int64_t>(a.positions[row]) + 1);
    Best best;
    for (int32_t token = thread; token < a.vocabulary; token += kChoiceThreads) {
        double value = logits[token];
        if (temperature > 0) {
            value += temperature * gumbel(token_bits(state, token));
        }
        best.offer(value, token);
    }
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
        const double other = device::shuffle_xor(best.value, lanes);
        best.offer(other, device::shuffle_xor(best.id, lanes));
    }
    if (thread % kWarp == 0) {
        bests[thread / kWarp] = best;
    }
    device::sync_block();
    if (thread == 0) {
        for (int w = 1; w < kChoiceWarps; ++w) {
            best.offer(bests[w].value, bests[w].id);
        }
        a.choices[row] = best.id < a.vocabulary ? best.id : 0;
    }
}

}  // namespace

Status device_choose(const TokenChoice& call, Stream stream) {
    if (call.sequences < 0 || call.tokens < 0 || call.vocabulary < 1 || call.vocabulary > 1 << kTokenBits) {
        return Status::bad_shape;
    }
    const int64_t rows = static_cast<int64_t>(call.sequences) * call.tokens;
    if (rows == 0) {
        return Status::ok;
    }
    if (any_null(call.logits, call.positions, call.temperatures, call.seeds, call.choices)) {
        return Status::null_pointer;
    }
    return launch(choose, dim3(static_cast<unsigned>(rows)), dim3(kChoiceThreads), kChoiceWarps * sizeof(Best), stream,
                  call);
}

}  // namespace ddtree
