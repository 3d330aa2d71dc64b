#include "ddtree/budget.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

namespace ddtree {

namespace {

// Products of the ratios down to every depth, [deepest + 1].
std::vector<double> factors_of(const double* ratios, int64_t deepest) {
    std::vector<double> factors(static_cast<size_t>(deepest) + 1, 1.0);
    std::partial_sum(ratios, ratios + deepest, factors.begin() + 1, std::multiplies<>());
    return factors;
}

double acceptance(double log_weight, double factor) { return std::min(1.0, std::exp(log_weight) * factor); }

}  // namespace

void acceptances(const double* log_weights, const int32_t* depths, int64_t n, const double* ratios, int64_t deepest,
                 double* accepted) {
    const std::vector<double> factors = factors_of(ratios, deepest);
    for (int64_t i = 0; i < n; ++i) accepted[i] = acceptance(log_weights[i], factors[static_cast<size_t>(depths[i])]);
}

void tried_mass(const int32_t* parents, const double* log_weights, int64_t n, const int32_t* path, int64_t m,
                double* mass) {
    std::fill_n(mass, m, 0.0);
    for (int64_t node = 1; node <= n; ++node) {
        const int32_t parent = parents[node];
        const int32_t* at = std::lower_bound(path, path + m, parent);
        if (at != path + m && *at == parent) {
            const double above = parent == 0 ? 0.0 : log_weights[parent - 1];
            mass[at - path] += std::exp(log_weights[node - 1] - above);
        }
    }
}

void learn(const double* mass, int64_t m, double keep, double* observed, double* predicted, int64_t deepest) {
    for (int64_t d = 0; d < deepest; ++d) {
        observed[d] *= keep;
        predicted[d] *= keep;
        if (d < m && mass[d] > 0) {
            observed[d] += d + 1 < m ? 1.0 : 0.0;
            predicted[d] += mass[d];
        }
    }
}

void calibrated_ratios(const double* observed, const double* predicted, int64_t deepest, Prior prior, double lowest,
                       double highest, double* ratios) {
    double ratio = prior.root;
    for (int64_t d = 0; d < deepest; ++d) {
        const double expected = prior.ratios ? prior.ratios[d] : ratio;
        ratio = (prior.weight * expected + observed[d]) / (prior.weight + predicted[d]);
        ratio = std::min(std::max(ratio, lowest), highest);
        ratios[d] = ratio;
    }
}

}  // namespace ddtree
