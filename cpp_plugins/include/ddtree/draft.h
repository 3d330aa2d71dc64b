// A draft's candidates from the logits of its positions.
#pragma once

#include "ddtree/launch.h"

namespace ddtree {

constexpr int32_t kMaxCandidates = 4096;

// Of each row its K largest, falling, of equal ones the lower id first; NaN is where -inf is. The log-probabilities of
// a row with NaN or +inf, or with nothing but -inf, are NaN.
struct DraftTop {
    const float* logits;   // [R, V]
    float* best;           // [R, K] log-probabilities; where `normalised` is 0 the logits themselves
    int32_t* ids;          // [R, K]
    int32_t rows;          // R
    int32_t vocabulary;    // V
    int32_t candidates_k;  // K <= V, 1 ... kMaxCandidates
    int32_t normalised;
};
Status draft_top(const DraftTop& call, Stream stream);

}  // namespace ddtree
