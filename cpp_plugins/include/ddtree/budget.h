// Choosing how much of a draft tree to verify, on raw pointers. n drafted nodes in pop order, node 0 the root.
#pragma once

#include <cstdint>
#include <vector>

namespace ddtree {

// How often walks went on at the depths 1 ... D that they came to, and how often they were predicted to.
struct Evidence {
    double* observed;   // [deepest]
    double* predicted;  // [deepest]
    int64_t deepest;
};

// What is assumed before there is evidence.
struct Prior {
    double weight;   // pseudo-observations, positive
    double highest;  // most that a ratio may be
    double root;     // the ratio used as that of the depth above the first
};

// r_1 ... r_D: observed over predicted, shrunk towards the ratio of the depth above, at most the highest.
std::vector<double> calibrated_ratios(const Evidence& evidence, const Prior& prior);

// accepted [n]: the acceptance probabilities of nodes, min(1, exp(log_weights [n]) * r_1 * ... * r_depth); 0 below
// `deepest`.
void acceptances(const double* log_weights, const int32_t* depths, int64_t n, const std::vector<double>& ratios,
                 int64_t deepest, double* accepted);

// Add a verified tree to the evidence, whose older counts are multiplied by `keep`. parents [n + 1], log_weights [n],
// path [m] rising from the root: at each of its nodes the children's mass, given that the node was reached, was tried,
// and the walk went on below all but the last. Depths without children learn nothing.
void learn(const int32_t* parents, const double* log_weights, int64_t n, const int32_t* path, int64_t m, double keep,
           const Evidence& evidence);

// Move every mean of what nodes between two sizes add, means [w] below sizes [w + 1], by `weight` towards the sums of
// gains [n].
void follow(const double* gains, int64_t n, const int64_t* sizes, int64_t w, double weight, double* means);

// The size of which most is made per second, (tokens + sums of gains up to it) / (seconds + added_s), and that rate; 0
// and the rate without a draft where there are no gains. gains [total], added_s [n], total at most n.
struct Size {
    int64_t size;
    double rate;
};
Size best_size(const double* gains, int64_t total, const double* added_s, double tokens, double seconds);

}  // namespace ddtree
