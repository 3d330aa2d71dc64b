#include <algorithm>
#include <cstring>
#include <limits>

#include "ddtree/noise.h"
#include "ddtree/sampling.h"

// The loops over all tokens are compiled for several processors; the present one's is chosen when the library loads.
#if defined(__x86_64__) && defined(__gnu_linux__) && __GNUC__ >= 12 && !defined(__clang__)
#define DDTREE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DDTREE_CLONES
#endif

namespace ddtree {

namespace {

constexpr int64_t kBlock = 1024;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The best token so far: the largest value, then the lowest id.
struct Best {
    double value;
    int64_t index = -1;
    int64_t token = 0;

    void offer(double candidate, int64_t i, int64_t id) {
        if (candidate > value || (candidate == value && index >= 0 && id < token)) {
            value = candidate;
            index = i;
            token = id;
        }
    }
};

// The noise is at most -log(uniform), and log2 of a float at least what its bits say when read as an integer: a
// straight line between powers of two. So no logarithm is needed to see that a token cannot win.
constexpr float kLog2 = 0.693147181f;
constexpr float kBitsPerOctave = 8388608.0f;  // 2^23

// Of a uniform number's upper 31 bits as an integer: 127 is the exponent's bias.
constexpr float kOffset = 127.0f + 31.0f;

inline float noise_bound_log2(uint64_t bits) {
    const float high = static_cast<float>(static_cast<int32_t>(bits >> 33));
    int32_t read;
    std::memcpy(&read, &high, sizeof read);
    return kOffset - static_cast<float>(read) / kBitsPerOctave;
}

struct Scan {
    bool invalid;     // a logit is NaN or +inf
    bool candidates;  // one may reach the threshold
};

// Upper bounds of logits[i] + temperature * noise for tokens first ... first + n.
DDTREE_CLONES Scan bound_logits(const float* logits, int64_t n, uint64_t state, float scale, float threshold,
                                float* bounds) {
    int32_t invalid = 0;
    int32_t candidates = 0;
    for (int64_t i = 0; i < n; ++i) {
        const float bound = logits[i] + scale * noise_bound_log2(token_bits(state, i));
        bounds[i] = bound;
        invalid |= !(logits[i] < std::numeric_limits<float>::infinity());
        candidates |= bound >= threshold;
    }
    return {invalid != 0, candidates != 0};
}

// The upper 31 bits of a uniform number as an integer: never above 2^31 * uniform but by rounding.
inline double upper_bits(uint64_t bits) { return static_cast<double>(static_cast<int32_t>(bits >> 33)); }

// How far weights[i] lies above threshold * uniform, times 2^31: a token whose weight / uniform is not above the
// threshold cannot win, since an exponential is at least its uniform number. Returns whether one may.
DDTREE_CLONES bool bound_weights(const double* weights, int64_t n, uint64_t state, double threshold, double* excess) {
    int64_t any = 0;
    for (int64_t i = 0; i < n; ++i) {
        excess[i] = weights[i] - threshold * upper_bits(token_bits(state, i));
        any |= excess[i] > 0.0;
    }
    return any != 0;
}

DDTREE_CLONES bool any_positive(const double* weights, int64_t n) {
    int64_t any = 0;
    for (int64_t i = 0; i < n; ++i) {
        any |= weights[i] > 0.0;
    }
    return any != 0;
}

}  // namespace

int64_t draw_logits(const float* logits, int64_t n, double temperature, const Place& place) {
    const uint64_t state = noise_state(place.seed, place.position);
    Best best{-kInfinity};
    const float scale = static_cast<float>(temperature) * kLog2;
    // A bound is computed in float32 from terms no larger than those here, and may be too low by their rounding.
    const auto lowest = [&] { return best.value - (std::abs(best.value) + 128.0 * temperature) * 0x1p-20; };
    float bounds[kBlock];
    double threshold = -std::numeric_limits<float>::max();
    for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t size = std::min(kBlock, n - first);
        const auto begin = state + static_cast<uint64_t>(first) * kGamma;
        const Scan scan = bound_logits(logits + first, size, begin, scale, static_cast<float>(threshold), bounds);
        if (scan.invalid) {
            return -1;
        }
        for (int64_t i = 0; scan.candidates && i < size; ++i) {
            if (static_cast<double>(bounds[i]) >= threshold) {
                const int64_t token = first + i;
                best.offer(logits[token] + temperature * gumbel(token_bits(begin, i)), token, token);
                threshold = best.index < 0 ? threshold : lowest();
            }
        }
    }
    return best.index;
}

int64_t draw_weights(const double* weights, const int32_t* ids, int64_t n, const Place& place) {
    const uint64_t state = noise_state(place.seed, place.position);
    Best best{0.0};
    // Margin of the comparison with weights; the rounding of a uniform number is far less.
    const auto lowest = [&] { return best.value * 0x1p-31 * (1.0 - 0x1p-20); };
    const auto offer = [&](int64_t i, int64_t token) {
        const uint64_t bits = token_bits(state, token);
        if (weights[i] > lowest() * upper_bits(bits)) {
            best.offer(weights[i] / exponential(bits), i, token);
        }
    };
    if (ids != nullptr) {
        for (int64_t i = 0; i < n; ++i) {
            offer(i, ids[i]);
        }
        return best.index;
    }
    double excess[kBlock];
    for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t size = std::min(kBlock, n - first);
        const auto begin = state + static_cast<uint64_t>(first) * kGamma;
        if (!any_positive(weights + first, size) || !bound_weights(weights + first, size, begin, lowest(), excess)) {
            continue;
        }
        for (int64_t i = 0; i < size; ++i) {
            if (excess[i] > 0.0) {
                offer(first + i, first + i);
            }
        }
    }
    return best.index;
}

}  // namespace ddtree
