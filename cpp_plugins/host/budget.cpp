#include "ddtree/budget.h"

#include <algorithm>
#include <cmath>

namespace ddtree {

Prefix best_prefix(const double* log_weights, const int32_t* depths, const double* factors, int64_t n, double draft_s,
                   const double* verify_s) {
    Prefix best{0, 1.0};
    double best_rate = 1.0 / (draft_s + verify_s[0]);
    double tokens = 1.0;
    for (int64_t i = 0; i < n; ++i) {
        tokens += std::min(1.0, std::exp(log_weights[i]) * factors[depths[i]]);
        const double rate = tokens / (draft_s + verify_s[i + 1]);
        if (rate > best_rate) {
            best_rate = rate;
            best = {i + 1, tokens};
        }
    }
    return best;
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

}  // namespace ddtree
