#include "ddtree/budget.h"

#include <algorithm>
#include <cmath>

namespace ddtree {

std::vector<double> calibrated_ratios(const Evidence& evidence, const Prior& prior) {
    std::vector<double> ratios(static_cast<size_t>(evidence.deepest));
    double ratio = prior.root;
    for (int64_t d = 0; d < evidence.deepest; ++d) {
        ratio = (prior.weight * ratio + evidence.observed[d]) / (prior.weight + evidence.predicted[d]);
        ratio = std::min(ratio, prior.highest);
        ratios[static_cast<size_t>(d)] = ratio;
    }
    return ratios;
}

void acceptances(const double* log_weights, const int32_t* depths, int64_t n, const std::vector<double>& ratios,
                 int64_t deepest, double* accepted) {
    std::vector<double> factors(1, 1.0);
    for (const double ratio : ratios) factors.push_back(factors.back() * ratio);
    for (int64_t i = 0; i < n; ++i) {
        const double factor = factors[static_cast<size_t>(depths[i])];
        accepted[i] = depths[i] > deepest ? 0.0 : std::min(1.0, std::exp(log_weights[i]) * factor);
    }
}

void learn(const int32_t* parents, const double* log_weights, int64_t n, const int32_t* path, int64_t m, double keep,
           const Evidence& evidence) {
    std::vector<double> tried(static_cast<size_t>(m), 0.0);
    for (int64_t node = 1; node <= n; ++node) {
        const int32_t parent = parents[node];
        const int32_t* at = std::lower_bound(path, path + m, parent);
        if (at != path + m && *at == parent) {
            const double above = parent == 0 ? 0.0 : log_weights[parent - 1];
            tried[static_cast<size_t>(at - path)] += std::exp(log_weights[node - 1] - above);
        }
    }
    for (int64_t d = 0; d < evidence.deepest; ++d) {
        const double mass = d < m ? tried[static_cast<size_t>(d)] : 0.0;
        evidence.observed[d] = evidence.observed[d] * keep + (mass > 0 && d + 1 < m ? 1.0 : 0.0);
        evidence.predicted[d] = evidence.predicted[d] * keep + mass;
    }
}

void follow(const double* gains, int64_t n, const int64_t* sizes, int64_t w, double weight, double* means) {
    for (int64_t i = 0; i < w; ++i) {
        double sum = 0.0;
        for (int64_t node = sizes[i]; node < std::min(sizes[i + 1], n); ++node) sum += gains[node];
        means[i] += weight * (sum - means[i]);
    }
}

Size best_size(const double* gains, int64_t total, const double* added_s, double tokens, double seconds) {
    Size best{0, tokens / seconds};
    for (int64_t i = 0; i < total; ++i) {
        tokens += gains[i];
        const double rate = tokens / (seconds + added_s[i]);
        if (i == 0 || rate > best.rate) best = {i + 1, rate};
    }
    return best;
}

}  // namespace ddtree
