// Drawing tokens by the noise of noise.h, on raw pointers: the largest of log-weight + noise is a draw in proportion to
// the weights (the Gumbel-max trick), and a change of the weights by rounding changes the draw at near ties only.
#pragma once

#include <cstdint>

namespace ddtree {

// Zero all but the smallest set of largest weights whose sum reaches `share` of the whole; of equal ones the first
// stay.
void keep_nucleus(double* weights, int64_t n, double share);

// The noise of the tokens at a position of a sequence, by the sequence's seed.
struct Place {
    uint64_t seed;
    int64_t position;
};

// The token 0 ... n - 1 that maximises logits[token] + temperature * noise, the lowest of equal ones; -1 where a logit
// is NaN or +inf, or where all are -inf. The temperature is positive and finite.
int64_t draw_logits(const float* logits, int64_t n, double temperature, const Place& place);

// The index that maximises log(weights[i]) + noise of the token ids[i], or i where `ids` is null; of equal ones that of
// the lowest id, and -1 where no weight is positive. Weights are finite and not negative; they need not add up to 1.
int64_t draw_weights(const double* weights, const int32_t* ids, int64_t n, const Place& place);

}  // namespace ddtree
