#include "ddtree/candidates.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace ddtree {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Sums in lanes, which compilers turn into vectors; a single running sum they must not reorder.
float dot(const float* a, const float* b, int64_t n) {
    constexpr int64_t kLanes = 16;
    float sums[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
    }
    float sum = 0.0f;
    for (; i < n; ++i) sum += a[i] * b[i];
    for (const float lane : sums) sum += lane;
    return sum;
}

}  // namespace

RowStatus check_rows(const float* log_probs, int64_t rows, int64_t candidates) {
    int unordered = 0;  // counted rather than returned early: the loop then vectorises
    for (int64_t r = 0; r < rows && candidates > 0; ++r) {
        const float* row = log_probs + r * candidates;
        unordered += !(row[0] < kInfinity);
        for (int64_t k = 1; k < candidates; ++k) {
            unordered += !(row[k - 1] >= row[k]);  // true for NaN too
        }
    }
    if (unordered == 0) {
        return RowStatus::ok;
    }
    const bool finite = std::all_of(log_probs, log_probs + rows * candidates, [](float x) { return x < kInfinity; });
    return finite ? RowStatus::not_sorted : RowStatus::not_a_number;
}

RowStatus check_links(const LinkedRows& source) {
    for (int64_t r = 0; r < source.rows; ++r) {
        const int32_t* links = source.next_rows + r * source.candidates;
        if (!std::all_of(links, links + source.candidates,
                         [&](int32_t next) { return next == kNoRow || (next > r && next < source.rows); })) {
            return RowStatus::bad_link;
        }
    }
    return check_rows(source.log_probs, source.rows, source.candidates);
}

void BilinearRows::reset(const Bilinear& source) {
    source_ = source;
    const auto rows = static_cast<size_t>(source.rows());
    const auto candidates = static_cast<size_t>(source.candidates);
    computed_.assign(rows, 0);
    if (log_probs_.size() < rows * candidates) {
        log_probs_.resize(rows * candidates);
        order_.resize(rows * candidates);
    }
    scores_.resize(candidates);
}

bool BilinearRows::compute(int64_t row) {
    if (computed_[static_cast<size_t>(row)]) {
        return true;
    }
    const int64_t count = source_.candidates;
    const int64_t at = source_.position(row) * count;
    const int64_t parent = row == 0 ? 0 : (row - 1) % count;
    const float* left = source_.left + (at + parent) * source_.rank;
    for (int64_t b = 0; b < count; ++b) {
        const float score = source_.unary[at + b] + dot(left, source_.right + (at + b) * source_.rank, source_.rank);
        if (!(score < kInfinity)) {
            return false;
        }
        scores_[static_cast<size_t>(b)] = score;
    }
    int32_t* order = order_.data() + row * count;
    std::iota(order, order + count, 0);
    const float* scores = scores_.data();
    std::sort(order, order + count,
              [scores](int32_t a, int32_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
    const double top = scores[order[0]];
    double sum = 0.0;
    for (int64_t k = 0; k < count; ++k) sum += std::exp(scores[order[k]] - top);
    float* log_probs = log_probs_.data() + row * count;
    const bool possible = top > -std::numeric_limits<double>::infinity();
    const double total = top + std::log(sum);
    for (int64_t k = 0; k < count; ++k) {
        log_probs[k] = possible ? static_cast<float>(scores[order[k]] - total) : -kInfinity;
    }
    computed_[static_cast<size_t>(row)] = 1;
    return true;
}

}  // namespace ddtree
