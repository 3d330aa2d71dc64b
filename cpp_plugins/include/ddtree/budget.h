// Choosing how much of a draft tree to verify, on raw pointers. n drafted nodes in pop order, node 0 the root.
#pragma once

#include <cstdint>

namespace ddtree {

struct Prefix {
    int64_t nodes;
    double expected_tokens;  // those without drafts + the sum of the nodes' acceptance probabilities
};

struct RoundCosts {
    double draft_s;
    const double* verify_s;  // [n + 1]: verifying a tree of so many nodes
    const int64_t* filled;   // [n + 1]: the largest tree at the cost of each, or null
};

// The number of nodes in least..n (n, if that is fewer) that maximises expected tokens per second, the smallest on
// ties, then as many more as cost nothing: the rule of arXiv 2606.01813. A node's acceptance probability is min(1,
// exp(log_weights [n]) * r_1 * ... * r_depth) with the ratios r_1 ... r_D [deepest].
Prefix best_prefix(const double* log_weights, const int32_t* depths, int64_t n, const double* ratios, int64_t deepest,
                   const RoundCosts& costs, int64_t least);

// The same over rows that several trees have in common, where row i of a pass holds node i of every tree that has one:
// the number of rows in least..n that maximises (tokens + gains[0] + ... ) / seconds, with gains [n] the sum of the
// nodes' acceptance probabilities in each row, and `tokens` those of a round without drafts.
Prefix best_rows(const double* gains, int64_t n, double tokens, const RoundCosts& costs, int64_t least);

// accepted [n]: the acceptance probabilities of nodes, as `best_prefix` has them.
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
