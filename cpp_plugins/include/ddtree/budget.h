// Choosing how much of a draft tree to verify, on raw pointers. n drafted nodes in pop order, node 0 the root.
#pragma once

#include <cstdint>

namespace ddtree {

// accepted [n]: the acceptance probabilities of nodes, min(1, exp(log_weights [n]) * r_1 * ... * r_depth) with the
// ratios r_1 ... r_D [deepest].
void acceptances(const double* log_weights, const int32_t* depths, int64_t n, const double* ratios, int64_t deepest,
                 double* accepted);

// mass [m]: for each node of the walked path, its children's drafted probability given that the node was reached.
// parents [n + 1], log_weights [n], path [m] rising from the root.
void tried_mass(const int32_t* parents, const double* log_weights, int64_t n, const int32_t* path, int64_t m,
                double* mass);

// Add a round to the evidence, whose older counts are multiplied by `keep`. The round tried mass [m] at depths 1 ... m
// and went on below all of them but the last; depths with a mass of 0 learn nothing.
void learn(const double* mass, int64_t m, double keep, double* observed, double* predicted, int64_t deepest);

struct Prior {
    const double* ratios;  // [deepest], or null: then the prior at a depth is the ratio of the depth above
    double weight;         // pseudo-observations, positive
    double root;           // the ratio used as that of the depth above the first
};

// r_1 ... r_D [deepest]: how often a walk went on at a depth [deepest] over how often it was predicted to, shrunk
// towards the prior and kept between lowest and highest.
void calibrated_ratios(const double* observed, const double* predicted, int64_t deepest, Prior prior, double lowest,
                       double highest, double* ratios);

}  // namespace ddtree
