// The host's tree build and walk behind a C interface, so that a machine without nanobind can compare with them.

#include <vector>

#include "ddtree/tree.h"

extern "C" {

// Rows of [cases, ...]; parents and log_weights leave padding alone. Returns the first case that failed, or -1.
int64_t host_build_trees(const float* log_probs, int64_t cases, int64_t positions, int64_t candidates,
                         const int32_t* budgets, int64_t tokens, int32_t* parents, int32_t* ranks, int32_t* depths,
                         double* log_weights, int32_t* counts) {
    ddtree::TreeWorkspace workspace;
    const std::vector<int32_t> tokens_unused(positions * candidates);
    for (int64_t i = 0; i < cases; ++i) {
        const float* rows = log_probs + i * positions * candidates;
        const ddtree::Marginals source{rows, tokens_unused.data(), positions, candidates};
        if (ddtree::build_tree(source, {budgets[i], positions, candidates}, workspace) != ddtree::RowStatus::ok) {
            return i;
        }
        const int64_t n = static_cast<int64_t>(workspace.nodes.size());
        counts[i] = static_cast<int32_t>(n + 1);
        for (int64_t j = 0; j < n && j + 1 < tokens; ++j) {
            const int64_t at = i * tokens + j + 1;
            parents[at] = workspace.nodes[j].parent;
            ranks[at] = workspace.nodes[j].rank;
            depths[at] = workspace.depths[j];
            log_weights[at] = workspace.nodes[j].log_weight;
        }
    }
    return -1;
}

// token_ids [cases, tokens] hold the root's token too.
void host_walks(const int32_t* parents, const int32_t* token_ids, const int32_t* choices, const int32_t* counts,
                int64_t cases, int64_t tokens, int32_t* paths, int32_t* lengths) {
    for (int64_t i = 0; i < cases; ++i) {
        const int64_t row = i * tokens;
        lengths[i] = static_cast<int32_t>(
            ddtree::walk(parents + row, token_ids + row + 1, choices + row, counts[i], paths + row));
    }
}

}  // extern "C"
