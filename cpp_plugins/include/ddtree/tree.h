// Host work of the stages `tree_build`, `tree_compile` and `verify` (the walk), on raw pointers.
//
// L draft positions, K candidates per position, n drafted nodes, T = 1 + n tree tokens, W mask columns.
// Node 0 is the root (the bonus token). Its parent is -1, and every other parent precedes its child: parents[i] < i.
#pragma once

#include <cstdint>
#include <vector>

#include "ddtree/candidates.h"

namespace ddtree {

// A candidate prefix: the path of `parent`, then the token of rank `rank` in the row of the parent's children.
struct Candidate {
    double log_weight;
    int32_t parent;
    int32_t rank;
};

// Nodes 1..n in pop order: entry i describes node i + 1. Kept between calls so that a warm build allocates nothing.
struct TreeWorkspace {
    std::vector<Candidate> nodes;
    std::vector<int32_t> depths;  // 1-based
    std::vector<int32_t> token_ids;
    std::vector<int32_t> child_rows;  // of nodes 0..n: the row of a node's children, or kNoRow
    std::vector<Candidate> heap;
};

struct TreeLimits {
    int64_t budget;
    int64_t max_depth;
    int64_t width;  // most children of a node: 1 makes a chain
};

// Algorithm 1 of arXiv 2604.12989: the most probable prefixes under the drafter's conditionals, best first, at most
// `budget` of at most `max_depth` tokens, each one of the `width` most probable after its parent. Marginals are
// conditionals that do not depend on the parent. Conditionals are at most 1, so a prefix never outweighs the one it
// extends, and the heap needs two candidates after each pop: the next sibling and the first child. Weights are summed
// in double from the root down. Equal weights are ordered by rank tuple, lexicographically and a prefix before its
// extensions: nodes 1..n are exactly the first n of all prefixes sorted by (-weight, ranks), so the tree of a smaller
// budget is the beginning of the tree of a larger one. A prefix of weight -inf is impossible and is never added, so
// fewer than `budget` nodes may be returned. Where the status is not ok the workspace holds no tree.
RowStatus build_tree(const Marginals& source, TreeLimits limits, TreeWorkspace& workspace);
RowStatus build_tree(const LinkedRows& source, TreeLimits limits, TreeWorkspace& workspace);
RowStatus build_tree(const Bilinear& source, TreeLimits limits, BilinearRows& rows, TreeWorkspace& workspace);

// The index of the first node whose parent breaks the order above, or -1 when there is none. parents [T], T >= 1.
// Parents are `least` or more: with -1 there may be several trees.
int64_t first_invalid_parent(const int32_t* parents, int64_t tree_tokens, int32_t least = 0);

// out [T, ceil(T / 32)]: bit j % 32 of word j / 32 in row i is set when j is i or an ancestor of i. There may be
// several trees.
void packed_mask(const int32_t* parents, int64_t tree_tokens, int32_t* out);

// From the root, follows the first child whose token is the target's choice at the current node, while there is one.
// token_ids [T - 1] belong to nodes 1..T-1, choices [T] to all nodes. Writes the visited nodes, the root first,
// to path [T] and returns their number.
template <typename Token>
int64_t walk(const int32_t* parents, const int32_t* token_ids, const Token* choices, int64_t tree_tokens,
             int32_t* path) {
    int32_t node = 0;
    int64_t length = 0;
    path[length++] = node;
    // Children follow their parents, so one forward scan visits every child of the current node.
    for (int64_t child = 1; child < tree_tokens; ++child) {
        if (parents[child] == node && static_cast<Token>(token_ids[child - 1]) == choices[node]) {
            node = static_cast<int32_t>(child);
            path[length++] = node;
        }
    }
    return length;
}

}  // namespace ddtree
