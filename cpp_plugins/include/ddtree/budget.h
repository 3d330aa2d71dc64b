// Choosing how much of a draft tree to verify, on raw pointers. n drafted nodes in pop order, node 0 the root.
#pragma once

#include <cstdint>

namespace ddtree {

struct Prefix {
    int64_t nodes;
    double expected_tokens;  // 1 + the sum of the nodes' acceptance probabilities
};

// The number of nodes in 0..n that maximises expected tokens per second, the smallest on ties: the rule of
// arXiv 2606.01813. A node's acceptance probability is min(1, exp(log_weights [n]) * factors[its depth]);
// verify_s [n + 1] is the cost of verifying a tree of so many nodes.
Prefix best_prefix(const double* log_weights, const int32_t* depths, const double* factors, int64_t n, double draft_s,
                   const double* verify_s);

// mass [m]: for each node of the walked path, its children's drafted probability given that the node was reached.
// parents [n + 1], log_weights [n], path [m] rising from the root.
void tried_mass(const int32_t* parents, const double* log_weights, int64_t n, const int32_t* path, int64_t m,
                double* mass);

}  // namespace ddtree
