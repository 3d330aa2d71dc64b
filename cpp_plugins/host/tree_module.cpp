// Python binding of trees: their sources, masks and the walk.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "arrays.h"
#include "ddtree/tree.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ddtree::binding {

namespace {

using Limit = std::optional<int64_t>;

TreeLimits checked_limits(int64_t budget, const Limit& max_depth, const Limit& width) {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 1;
    if (budget < 0 || budget > kMost) {
        bad_value("budget must be between 0 and 2**31 - 2, found " + std::to_string(budget));
    }
    if (max_depth && *max_depth < 0) {
        bad_value("max_depth must be 0 or more, found " + std::to_string(*max_depth));
    }
    if (width && *width < 1) {
        bad_value("width must be 1 or more, found " + std::to_string(*width));
    }
    return {budget, std::min(max_depth.value_or(kMost), kMost), std::min(width.value_or(kMost), kMost)};
}

void check_shape(const Input& array, const char* name, const Input& like, const char* its_name) {
    bool equal = array.ndim() == like.ndim();
    for (size_t i = 0; equal && i < array.ndim(); ++i) equal = array.shape(i) == like.shape(i);
    if (!equal) {
        bad_value(std::string(name) + " must have the shape of " + its_name + ", " + shape_text(like) + ", found " +
                  shape_text(array));
    }
}

// `name`: the array whose rows are checked.
void check(RowStatus status, const std::string& name) {
    switch (status) {
        case RowStatus::ok:
            return;
        case RowStatus::not_a_number:
            bad_value(name + " must be below +inf and not NaN");
        case RowStatus::not_sorted:
            bad_value(name + " must fall along every row: sort the candidates of a row by probability");
        case RowStatus::bad_link:
            bad_value("next_rows must be -1 or the index of a later row");
    }
}

nb::tuple tree_of(const TreeWorkspace& workspace) {
    const size_t n = workspace.nodes.size();
    std::unique_ptr<int32_t[]> parents(new int32_t[n + 1]);
    std::unique_ptr<double[]> log_weights(new double[n]);
    parents[0] = -1;
    for (size_t i = 0; i < n; ++i) {
        parents[i + 1] = workspace.nodes[i].parent;
        log_weights[i] = workspace.nodes[i].log_weight;
    }
    return nb::make_tuple(copied(workspace.token_ids), copied(workspace.depths), to_numpy(std::move(parents), {n + 1}),
                          to_numpy(std::move(log_weights), {n}));
}

TreeWorkspace& shared_workspace() {
    static thread_local TreeWorkspace workspace;
    return workspace;
}

nb::tuple build_marginal_tree(const Input& log_probs, const Input& token_ids, int64_t budget, const Limit& max_depth,
                              const Limit& width) {
    const float* weights = checked<float>(log_probs, "log_probs", "[L, K]", 2);
    const int32_t* tokens = checked<int32_t>(token_ids, "token_ids", "[L, K]", 2);
    check_shape(token_ids, "token_ids", log_probs, "log_probs");
    const TreeLimits limits = checked_limits(budget, max_depth, width);
    TreeWorkspace& workspace = shared_workspace();
    check(build_tree(Marginals{weights, tokens, extent(log_probs, 0), extent(log_probs, 1)}, limits, workspace),
          "log_probs");
    return tree_of(workspace);
}

nb::tuple build_linked_tree(const Input& log_probs, const Input& token_ids, const Input& next_rows, int64_t budget,
                            const Limit& max_depth, const Limit& width) {
    const float* weights = checked<float>(log_probs, "log_probs", "[R, K]", 2);
    const int32_t* tokens = checked<int32_t>(token_ids, "token_ids", "[R, K]", 2);
    const int32_t* links = checked<int32_t>(next_rows, "next_rows", "[R, K]", 2);
    check_shape(token_ids, "token_ids", log_probs, "log_probs");
    check_shape(next_rows, "next_rows", log_probs, "log_probs");
    const TreeLimits limits = checked_limits(budget, max_depth, width);
    TreeWorkspace& workspace = shared_workspace();
    check(build_tree(LinkedRows{weights, tokens, links, extent(log_probs, 0), extent(log_probs, 1)}, limits, workspace),
          "log_probs");
    return tree_of(workspace);
}

Bilinear checked_bilinear(const Input& unary, const Input& token_ids, const Input& left, const Input& right) {
    const float* scores = checked<float>(unary, "unary", "[L, C]", 2);
    const int32_t* tokens = checked<int32_t>(token_ids, "token_ids", "[L, C]", 2);
    const float* lefts = checked<float>(left, "left", "[L, C, r]", 3);
    const float* rights = checked<float>(right, "right", "[L, C, r]", 3);
    check_shape(token_ids, "token_ids", unary, "unary");
    check_shape(right, "right", left, "left");
    if (left.shape(0) != unary.shape(0) || left.shape(1) != unary.shape(1)) {
        bad_value("left must have shape [L, C, r] for unary " + shape_text(unary) + ", found " + shape_text(left));
    }
    return {scores, tokens, lefts, rights, extent(unary, 0), extent(unary, 1), extent(left, 2)};
}

BilinearRows& shared_rows() {
    static thread_local BilinearRows rows;
    return rows;
}

constexpr const char* kScores = "the conditional scores (unary and the products of left and right)";

nb::tuple build_bilinear_tree(const Input& unary, const Input& token_ids, const Input& left, const Input& right,
                              int64_t budget, const Limit& max_depth, const Limit& width) {
    const Bilinear source = checked_bilinear(unary, token_ids, left, right);
    const TreeLimits limits = checked_limits(budget, max_depth, width);
    check(check_rows(source.unary, source.positions, source.candidates), "unary");
    TreeWorkspace& workspace = shared_workspace();
    check(build_tree(source, limits, shared_rows(), workspace), kScores);
    return tree_of(workspace);
}

nb::tuple bilinear_rows(const Input& unary, const Input& token_ids, const Input& left, const Input& right,
                        const Input& rows) {
    const Bilinear source = checked_bilinear(unary, token_ids, left, right);
    const int32_t* wanted = checked<int32_t>(rows, "rows", "[F]", 1);
    const auto count = static_cast<size_t>(extent(rows, 0));
    const auto candidates = static_cast<size_t>(source.candidates);
    check(check_rows(source.unary, source.positions, source.candidates), "unary");
    BilinearRows& computed = shared_rows();
    computed.reset(source);
    std::unique_ptr<float[]> log_probs(new float[count * candidates]);
    std::unique_ptr<int32_t[]> tokens(new int32_t[count * candidates]);
    std::unique_ptr<int32_t[]> next_rows(new int32_t[count * candidates]);
    for (size_t i = 0; i < count; ++i) {
        const int32_t row = wanted[i];
        if (row < 0 || row >= source.rows()) {
            bad_value("rows must be 0 ... " + std::to_string(source.rows() - 1) + ", found " + std::to_string(row));
        }
        if (source.candidates == 0) {
            continue;
        }
        check(computed.compute(row) ? RowStatus::ok : RowStatus::not_a_number, kScores);
        const int64_t position = source.position(row);
        for (size_t k = 0; k < candidates; ++k) {
            const int32_t candidate = computed.order(row)[k];
            log_probs[i * candidates + k] = computed.log_probs(row)[k];
            tokens[i * candidates + k] = source.token_ids[position * source.candidates + candidate];
            next_rows[i * candidates + k] = source.row_below(position, candidate);
        }
    }
    return nb::make_tuple(to_numpy(std::move(log_probs), {count, candidates}),
                          to_numpy(std::move(tokens), {count, candidates}),
                          to_numpy(std::move(next_rows), {count, candidates}));
}

nb::object packed_mask(const Input& parents) {
    const int32_t* tree = checked_parents(parents, -1);
    const size_t tree_tokens = parents.shape(0);
    const size_t words = (tree_tokens + 31) / 32;
    std::unique_ptr<int32_t[]> mask(new int32_t[tree_tokens * words]);
    ddtree::packed_mask(tree, static_cast<int64_t>(tree_tokens), mask.get());
    return to_numpy(std::move(mask), {tree_tokens, words});
}

nb::object walk(const Input& parents, const Input& token_ids, const Input& choices) {
    const int32_t* tree = checked_parents(parents);
    const int32_t* tokens = checked<int32_t>(token_ids, "token_ids", "[T - 1]", 1);
    const int64_t tree_tokens = extent(parents, 0);
    if (extent(token_ids, 0) != tree_tokens - 1) {
        bad_value("token_ids must have shape [T - 1] = [" + std::to_string(tree_tokens - 1) + "], found " +
                  shape_text(token_ids));
    }
    const bool wide = choices.dtype() == nb::dtype<int64_t>();
    if (!wide && choices.dtype() != nb::dtype<int32_t>()) {
        throw nb::type_error("choices must have dtype int64 or int32");
    }
    const void* chosen = wide ? static_cast<const void*>(checked<int64_t>(choices, "choices", "[T]", 1))
                              : checked<int32_t>(choices, "choices", "[T]", 1);
    if (extent(choices, 0) != tree_tokens) {
        bad_value("choices must have shape [T] = [" + std::to_string(tree_tokens) + "], found " + shape_text(choices));
    }

    std::unique_ptr<int32_t[]> path(new int32_t[static_cast<size_t>(tree_tokens)]);
    const int64_t length =
        wide ? ddtree::walk(tree, tokens, static_cast<const int64_t*>(chosen), tree_tokens, path.get())
             : ddtree::walk(tree, tokens, static_cast<const int32_t*>(chosen), tree_tokens, path.get());
    return to_numpy(std::move(path), {static_cast<size_t>(length)});
}

}  // namespace

void bind_trees(nb::module_& m) {
    m.def("build_tree", &build_marginal_tree, "log_probs"_a, "token_ids"_a, "budget"_a, "max_depth"_a = nb::none(),
          "width"_a = nb::none());
    m.def("build_linked_tree", &build_linked_tree, "log_probs"_a, "token_ids"_a, "next_rows"_a, "budget"_a,
          "max_depth"_a = nb::none(), "width"_a = nb::none());
    m.def("build_bilinear_tree", &build_bilinear_tree, "unary"_a, "token_ids"_a, "left"_a, "right"_a, "budget"_a,
          "max_depth"_a = nb::none(), "width"_a = nb::none());
    m.def("bilinear_rows", &bilinear_rows, "unary"_a, "token_ids"_a, "left"_a, "right"_a, "rows"_a);
    m.def("packed_mask", &packed_mask, "parents"_a);
    m.def("walk", &walk, "parents"_a, "token_ids"_a, "choices"_a);
}

}  // namespace ddtree::binding
