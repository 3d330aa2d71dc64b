#include "ddtree/tree.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace ddtree {

namespace {

BuildStatus check_rows(const float* log_probs, int64_t positions, int64_t candidates) {
    int unordered = 0;  // counted rather than returned early: the loop then vectorises
    for (int64_t d = 0; d < positions && candidates > 0; ++d) {
        const float* row = log_probs + d * candidates;
        unordered += !(row[0] < std::numeric_limits<float>::infinity());
        for (int64_t k = 1; k < candidates; ++k) {
            unordered += !(row[k - 1] >= row[k]);  // true for NaN too
        }
    }
    if (unordered == 0) {
        return BuildStatus::ok;
    }
    const bool finite = std::all_of(log_probs, log_probs + positions * candidates,
                                    [](float x) { return x < std::numeric_limits<float>::infinity(); });
    return finite ? BuildStatus::not_sorted : BuildStatus::not_a_number;
}

// Best first: larger weight, then the lexicographically smaller rank tuple, which is the order of the published
// heap entries (-log_weight, ranks). Tuples are not stored: a tie is decided by climbing to where the paths part.
class Better {
public:
    explicit Better(const TreeWorkspace& workspace) : workspace_(workspace) {}

    bool operator()(const Candidate& a, const Candidate& b) const {
        if (a.log_weight != b.log_weight) {
            return a.log_weight > b.log_weight;
        }
        return ranks_less(a, b);
    }

private:
    int32_t depth(const Candidate& c) const { return c.parent == 0 ? 1 : workspace_.depths[c.parent - 1] + 1; }
    const Candidate& parent(const Candidate& c) const { return workspace_.nodes[c.parent - 1]; }

    bool ranks_less(const Candidate& left, const Candidate& right) const {
        Candidate a = left;
        Candidate b = right;
        const int32_t depth_a = depth(a);
        const int32_t depth_b = depth(b);
        for (int32_t d = depth_a; d > depth_b; --d) a = parent(a);
        for (int32_t d = depth_b; d > depth_a; --d) b = parent(b);
        while (a.parent != b.parent) {
            a = parent(a);
            b = parent(b);
        }
        if (a.rank != b.rank) {
            return a.rank < b.rank;
        }
        return depth_a < depth_b;  // one is a prefix of the other
    }

    const TreeWorkspace& workspace_;
};

}  // namespace

BuildStatus build_tree(const float* log_probs, int64_t positions, int64_t candidates, int64_t budget,
                       TreeWorkspace& workspace) {
    const BuildStatus status = check_rows(log_probs, positions, candidates);
    if (status != BuildStatus::ok) {
        return status;
    }
    auto& nodes = workspace.nodes;
    auto& depths = workspace.depths;
    auto& heap = workspace.heap;
    nodes.clear();
    depths.clear();
    heap.clear();

    const Better better(workspace);
    const auto worse = [&better](const Candidate& a, const Candidate& b) { return better(b, a); };
    const auto push = [&](int32_t parent, int32_t depth, int64_t rank) {
        const double above = parent == 0 ? 0.0 : nodes[parent - 1].log_weight;
        const double log_weight = above + log_probs[(depth - 1) * candidates + rank];
        if (log_weight == -std::numeric_limits<double>::infinity()) {
            return;
        }
        heap.push_back({log_weight, parent, static_cast<int32_t>(rank)});
        std::push_heap(heap.begin(), heap.end(), worse);
    };

    if (positions > 0 && candidates > 0) {
        push(0, 1, 0);
    }
    while (static_cast<int64_t>(nodes.size()) < budget && !heap.empty()) {
        std::pop_heap(heap.begin(), heap.end(), worse);
        const Candidate best = heap.back();
        heap.pop_back();
        const int32_t depth = best.parent == 0 ? 1 : depths[best.parent - 1] + 1;
        nodes.push_back(best);
        depths.push_back(depth);
        if (best.rank + 1 < candidates) {
            push(best.parent, depth, best.rank + 1);
        }
        if (depth < positions) {
            push(static_cast<int32_t>(nodes.size()), depth + 1, 0);
        }
    }
    return BuildStatus::ok;
}

int64_t first_invalid_parent(const int32_t* parents, int64_t tree_tokens) {
    if (parents[0] != -1) {
        return 0;
    }
    for (int64_t i = 1; i < tree_tokens; ++i) {
        if (parents[i] < 0 || parents[i] >= i) {
            return i;
        }
    }
    return -1;
}

void attention_bias(const int32_t* parents, int64_t tree_tokens, int64_t past, int64_t columns, float* out) {
    constexpr float kHidden = std::numeric_limits<float>::lowest();
    for (int64_t i = 0; i < tree_tokens; ++i) {
        float* row = out + i * columns;
        std::fill_n(row, past, 0.0f);
        if (i == 0) {
            std::fill_n(row + past, columns - past, kHidden);
        } else {
            std::memcpy(row + past, out + parents[i] * columns + past,
                        static_cast<size_t>(columns - past) * sizeof(float));
        }
        row[past + i] = 0.0f;
    }
}

void packed_mask(const int32_t* parents, int64_t tree_tokens, int32_t* out) {
    const int64_t words = (tree_tokens + 31) / 32;
    for (int64_t i = 0; i < tree_tokens; ++i) {
        int32_t* row = out + i * words;
        if (i == 0) {
            std::fill_n(row, words, 0);
        } else {
            std::memcpy(row, out + parents[i] * words, static_cast<size_t>(words) * sizeof(int32_t));
        }
        row[i / 32] = static_cast<int32_t>(static_cast<uint32_t>(row[i / 32]) | (uint32_t{1} << (i % 32)));
    }
}

}  // namespace ddtree
