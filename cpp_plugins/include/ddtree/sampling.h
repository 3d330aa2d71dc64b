// Drawing from weights [n], float64, finite and not negative, on raw pointers. They need not add up to 1.
#pragma once

#include <cstdint>

namespace ddtree {

// Zero all but the smallest set of largest weights whose sum reaches `share` of the whole; of equal ones the first stay.
void keep_nucleus(double* weights, int64_t n, double share);

// The first index at which the running sum exceeds `uniform` (in [0, 1)) of the whole, or -1 where no weight is
// positive. The index has a positive weight.
int64_t draw(const double* weights, int64_t n, double uniform);

}  // namespace ddtree
