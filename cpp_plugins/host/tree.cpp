#include "ddtree/tree.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace ddtree {

namespace {

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

// What the heap asks of a source. `ready` computes a row if need be, and is false where it cannot be used.

struct MarginalRows {
    const Marginals& source;

    bool ready(int32_t) const { return true; }
    const float* log_probs(int32_t row) const { return source.log_probs + row * source.candidates; }
    int32_t token(int32_t row, int32_t rank) const { return source.token_ids[row * source.candidates + rank]; }
    int32_t below(int32_t row, int32_t) const { return row + 1 < source.rows ? row + 1 : kNoRow; }
};

struct LinkedRowsOf {
    const LinkedRows& source;

    bool ready(int32_t) const { return true; }
    const float* log_probs(int32_t row) const { return source.log_probs + row * source.candidates; }
    int32_t token(int32_t row, int32_t rank) const { return source.token_ids[row * source.candidates + rank]; }
    int32_t below(int32_t row, int32_t rank) const { return source.next_rows[row * source.candidates + rank]; }
};

struct BilinearRowsOf {
    BilinearRows& rows;

    bool ready(int32_t row) const { return rows.compute(row); }
    const float* log_probs(int32_t row) const { return rows.log_probs(row); }
    int32_t token(int32_t row, int32_t rank) const {
        const Bilinear& source = rows.source();
        return source.token_ids[source.position(row) * source.candidates + rows.order(row)[rank]];
    }
    int32_t below(int32_t row, int32_t rank) const {
        const Bilinear& source = rows.source();
        return source.row_below(source.position(row), rows.order(row)[rank]);
    }
};

template <typename Source>
RowStatus grow(const Source& source, bool empty, int64_t candidates, TreeLimits limits, TreeWorkspace& workspace) {
    auto& [nodes, depths, token_ids, child_rows, heap] = workspace;
    nodes.clear();
    depths.clear();
    token_ids.clear();
    child_rows.assign(1, empty || limits.max_depth < 1 || limits.width < 1 ? kNoRow : 0);
    heap.clear();
    const int64_t width = std::min(candidates, limits.width);

    const Better better(workspace);
    const auto worse = [&better](const Candidate& a, const Candidate& b) { return better(b, a); };
    const auto push = [&](int32_t parent, int32_t rank, double above) {
        const double log_weight = above + source.log_probs(workspace.child_rows[parent])[rank];
        if (log_weight == -std::numeric_limits<double>::infinity()) {
            return;
        }
        workspace.heap.push_back({log_weight, parent, rank});
        std::push_heap(workspace.heap.begin(), workspace.heap.end(), worse);
    };
    const auto push_first_child = [&](int32_t parent, double above) {
        const int32_t row = workspace.child_rows[parent];
        if (row == kNoRow) {
            return true;
        }
        if (!source.ready(row)) {
            return false;
        }
        push(parent, 0, above);
        return true;
    };

    if (limits.budget < 1) {
        return RowStatus::ok;
    }
    if (!push_first_child(0, 0.0)) {
        return RowStatus::not_a_number;
    }
    while (!heap.empty()) {
        std::pop_heap(heap.begin(), heap.end(), worse);
        const Candidate best = heap.back();
        heap.pop_back();
        const int32_t depth = best.parent == 0 ? 1 : depths[best.parent - 1] + 1;
        const int32_t row = child_rows[best.parent];
        nodes.push_back(best);
        depths.push_back(depth);
        token_ids.push_back(source.token(row, best.rank));
        child_rows.push_back(depth < limits.max_depth ? source.below(row, best.rank) : kNoRow);
        if (static_cast<int64_t>(nodes.size()) == limits.budget) {
            break;
        }
        if (best.rank + 1 < width) {
            const double above = best.parent == 0 ? 0.0 : nodes[best.parent - 1].log_weight;
            push(best.parent, best.rank + 1, above);
        }
        if (!push_first_child(static_cast<int32_t>(nodes.size()), best.log_weight)) {
            return RowStatus::not_a_number;
        }
    }
    return RowStatus::ok;
}

}  // namespace

RowStatus build_tree(const Marginals& source, TreeLimits limits, TreeWorkspace& workspace) {
    const RowStatus status = check_rows(source.log_probs, source.rows, source.candidates);
    const bool empty = source.rows == 0 || source.candidates == 0;
    return status == RowStatus::ok ? grow(MarginalRows{source}, empty, source.candidates, limits, workspace) : status;
}

RowStatus build_tree(const LinkedRows& source, TreeLimits limits, TreeWorkspace& workspace) {
    const RowStatus status = check_links(source);
    const bool empty = source.rows == 0 || source.candidates == 0;
    return status == RowStatus::ok ? grow(LinkedRowsOf{source}, empty, source.candidates, limits, workspace) : status;
}

RowStatus build_tree(const Bilinear& source, TreeLimits limits, BilinearRows& rows, TreeWorkspace& workspace) {
    const RowStatus status = check_rows(source.unary, source.positions, source.candidates);
    if (status != RowStatus::ok) {
        return status;
    }
    rows.reset(source);
    const bool empty = source.positions == 0 || source.candidates == 0;
    return grow(BilinearRowsOf{rows}, empty, source.candidates, limits, workspace);
}

int64_t first_invalid_parent(const int32_t* parents, int64_t tree_tokens, int32_t least) {
    if (parents[0] != -1) {
        return 0;
    }
    for (int64_t i = 1; i < tree_tokens; ++i) {
        if (parents[i] < least || parents[i] >= i) {
            return i;
        }
    }
    return -1;
}

void packed_mask(const int32_t* parents, int64_t tree_tokens, int32_t* out) {
    const int64_t words = (tree_tokens + 31) / 32;
    for (int64_t i = 0; i < tree_tokens; ++i) {
        int32_t* row = out + i * words;
        if (parents[i] < 0) {
            std::fill_n(row, words, 0);
        } else {
            std::memcpy(row, out + parents[i] * words, static_cast<size_t>(words) * sizeof(int32_t));
        }
        row[i / 32] = static_cast<int32_t>(static_cast<uint32_t>(row[i / 32]) | (uint32_t{1} << (i % 32)));
    }
}

}  // namespace ddtree
