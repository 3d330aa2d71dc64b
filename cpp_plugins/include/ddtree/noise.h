// Noise of tokens: a function of a seed, the position the token would have in its sequence, and its id.
//
// The counter (position << 24) + token of SplitMix64 (Steele, Lea, Flood 2014) gives 64 bits, the upper 63 of them a
// float32 `uniform` in (0, 1), and that a Gumbel variable -log(-log(1 - uniform)). It falls as the bits rise, and is
// most exact where it is largest. Host and device draw by these functions.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define DDTREE_EITHER __host__ __device__
#else
#define DDTREE_EITHER
#endif

namespace ddtree {

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15;
constexpr int kTokenBits = 24;

// The generator's state for token 0 of a position; that of token t is kGamma * t further on.
DDTREE_EITHER inline uint64_t noise_state(uint64_t seed, int64_t position) {
    return seed + ((static_cast<uint64_t>(position) << kTokenBits) + 1) * kGamma;
}

DDTREE_EITHER inline uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

DDTREE_EITHER inline uint64_t token_bits(uint64_t state, int64_t token) {
    return mixed(state + static_cast<uint64_t>(token) * kGamma);
}

// In (0, 1): never 0, and never rounded to 1, so that no noise is infinite.
DDTREE_EITHER inline float uniform(uint64_t bits) {
    const float rounded = static_cast<float>(static_cast<int64_t>((bits >> 1) | 1)) * 0x1p-63f;
    return rounded < 1.0f ? rounded : 0x1.fffffep-1f;
}

// Exponential with mean 1; the noise is its logarithm, negated.
DDTREE_EITHER inline double exponential(uint64_t bits) { return -std::log1p(-static_cast<double>(uniform(bits))); }

DDTREE_EITHER inline double gumbel(uint64_t bits) { return -std::log(exponential(bits)); }

}  // namespace ddtree
