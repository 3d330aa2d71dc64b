#include "ddtree/sampling.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

namespace ddtree {

namespace {

constexpr int64_t kBuckets = 1024;  // 64 octaves: smaller weights add nothing to a sum of doubles

// Four running sums: one alone waits for each addition.
double sum(const double* values, int64_t n) {
    double part[4] = {0.0, 0.0, 0.0, 0.0};
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        for (int64_t j = 0; j < 4; ++j) {
            part[j] += values[i + j];
        }
    }
    return std::accumulate(values + i, values + n, (part[0] + part[1]) + (part[2] + part[3]));
}

// Exponent and four bits of the mantissa: rises with the value.
int64_t leading_bits(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<int64_t>(bits >> 48);
}

}  // namespace

void keep_nucleus(double* weights, int64_t n, double share) {
    if (n == 0) {
        return;
    }
    // Sorting all would cost the most: buckets of nearly equal weights, largest first, find where the set ends, and
    // only that bucket is sorted.
    const int64_t highest = leading_bits(*std::max_element(weights, weights + n));
    const auto bucket_of = [&](double w) {
        return std::min(std::max(highest - leading_bits(w), int64_t{0}), kBuckets - 1);
    };
    std::array<double, kBuckets> mass{};
    for (int64_t i = 0; i < n; ++i) {
        mass[static_cast<size_t>(bucket_of(weights[i]))] += weights[i];
    }
    const double wanted = share * sum(mass.data(), kBuckets);
    double above = 0.0;
    int64_t last = 0;
    while (last + 1 < kBuckets && above + mass[static_cast<size_t>(last)] < wanted) {
        above += mass[static_cast<size_t>(last++)];
    }

    std::vector<double> falling;
    std::copy_if(weights, weights + n, std::back_inserter(falling), [&](double w) { return bucket_of(w) == last; });
    if (falling.empty()) {
        return;  // only rounding is left of the whole: all of it is kept
    }
    std::sort(falling.begin(), falling.end(), std::greater<>());
    size_t kept = 1;
    for (above += falling[0]; above < wanted && kept < falling.size(); ++kept) {
        above += falling[kept];
    }
    const double least = falling[kept - 1];
    auto extra = std::count(falling.begin() + static_cast<int64_t>(kept), falling.end(), least);
    for (int64_t i = 0; i < n; ++i) {  // a selection instead of a branch, which would be hard to predict
        weights[i] = weights[i] < least ? 0.0 : weights[i];
    }
    for (int64_t i = n; extra > 0; --extra) {
        while (weights[--i] != least) {
        }
        weights[i] = 0.0;
    }
}

}  // namespace ddtree
