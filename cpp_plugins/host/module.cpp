// Python binding of the host part: checks NumPy's arrays, allocates the results, and nothing else. Trees are bound in
// tree_module.cpp.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "arrays.h"
#include "ddtree/attention_plan.h"
#include "ddtree/budget.h"
#include "ddtree/kv.h"
#include "ddtree/noise.h"
#include "ddtree/sampling.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace ddtree::binding;

namespace ddtree::binding {
void bind_trees(nb::module_& m);
}

namespace {

// Nodes in pop order and the ratios of their depths.
struct Nodes {
    const double* log_weights;
    const int32_t* depths;
    int64_t n;
    const double* ratios;
    int64_t deepest;
};

Nodes checked_nodes(const Input& log_weights, const Input& depths, const Input& ratios) {
    const Nodes nodes{checked<double>(log_weights, "log_weights", "[n]", 1),
                      checked<int32_t>(depths, "depths", "[n]", 1), extent(log_weights, 0),
                      checked<double>(ratios, "ratios", "[D]", 1), extent(ratios, 0)};
    if (extent(depths, 0) != nodes.n) {
        bad_value("depths must have n entries for n = " + std::to_string(nodes.n) + ", found " + shape_text(depths));
    }
    if (std::any_of(nodes.depths, nodes.depths + nodes.n, [&](int32_t d) { return d < 1 || d > nodes.deepest; })) {
        bad_value("depths must be 1 ... D with a ratio for each: ratios has shape " + shape_text(ratios));
    }
    return nodes;
}

nb::object acceptances(const Input& log_weights, const Input& depths, const Input& ratios) {
    const Nodes nodes = checked_nodes(log_weights, depths, ratios);
    std::unique_ptr<double[]> accepted(new double[static_cast<size_t>(nodes.n)]);
    ddtree::acceptances(nodes.log_weights, nodes.depths, nodes.n, nodes.ratios, nodes.deepest, accepted.get());
    return to_numpy(std::move(accepted), {static_cast<size_t>(nodes.n)});
}

nb::object tried_mass(const Input& parents, const Input& log_weights, const Input& path) {
    const int32_t* tree = checked_parents(parents);
    const double* weights = checked<double>(log_weights, "log_weights", "[n]", 1);
    const int32_t* walked = checked<int32_t>(path, "path", "[m]", 1);
    const int64_t n = extent(parents, 0) - 1;
    const int64_t m = extent(path, 0);
    if (extent(log_weights, 0) != n) {
        bad_value("log_weights must have shape [n] = [" + std::to_string(n) + "], found " + shape_text(log_weights));
    }
    for (int64_t j = 0; j < m; ++j) {
        if (walked[j] > n || (j == 0 ? walked[j] != 0 : walked[j] <= walked[j - 1])) {
            bad_value("path must rise from the root 0 to at most n = " + std::to_string(n) + ": path[" +
                      std::to_string(j) + "] is " + std::to_string(walked[j]));
        }
    }
    std::unique_ptr<double[]> mass(new double[static_cast<size_t>(m)]);
    ddtree::tried_mass(tree, weights, n, walked, m, mass.get());
    return to_numpy(std::move(mass), {static_cast<size_t>(m)});
}

void learn(const Output& evidence, const Input& mass, double keep) {
    double* observed = checked<double>(evidence, "evidence", "[2, D]", 2);
    const double* tried = checked<double>(mass, "mass", "[m]", 1);
    const auto deepest = static_cast<int64_t>(evidence.shape(1));
    if (evidence.shape(0) != 2) {
        bad_value("evidence must have shape [2, D], found " + shape_text(evidence));
    }
    ddtree::learn(tried, extent(mass, 0), keep, observed, observed + deepest, deepest);
}

nb::object calibrated_ratios(const Input& evidence, const std::optional<Input>& priors, double weight, double lowest,
                             double highest, double root) {
    const double* observed = checked<double>(evidence, "evidence", "[2, D]", 2);
    const int64_t deepest = extent(evidence, 1);
    if (extent(evidence, 0) != 2) {
        bad_value("evidence must have shape [2, D], found " + shape_text(evidence));
    }
    const double* expected = priors ? checked<double>(*priors, "priors", "[D]", 1) : nullptr;
    if (priors && extent(*priors, 0) != deepest) {
        bad_value("priors must have shape [D] = [" + std::to_string(deepest) + "], found " + shape_text(*priors));
    }
    if (!(weight > 0) || !(lowest <= highest)) {
        bad_value("weight must be positive and lowest at most highest");
    }
    std::unique_ptr<double[]> ratios(new double[static_cast<size_t>(deepest)]);
    ddtree::calibrated_ratios(observed, observed + deepest, deepest, {expected, weight, root}, lowest, highest,
                              ratios.get());
    return to_numpy(std::move(ratios), {static_cast<size_t>(deepest)});
}

void keep_nucleus(const Output& weights, double share) {
    double* kept = checked<double>(weights, "weights", "[n]", 1);
    ddtree::keep_nucleus(kept, static_cast<int64_t>(weights.shape(0)), share);
}

int64_t draw_logits(const Input& logits, double temperature, uint64_t seed, int64_t position) {
    const float* values = checked<float>(logits, "logits", "[V]", 1);
    if (!(temperature > 0) || !std::isfinite(temperature)) {
        bad_value("temperature must be positive and finite, found " + std::to_string(temperature));
    }
    return ddtree::draw_logits(values, extent(logits, 0), temperature, {seed, position});
}

int64_t draw_weights(const Input& weights, uint64_t seed, int64_t position, const std::optional<Input>& ids) {
    const double* values = checked<double>(weights, "weights", "[n]", 1);
    const int32_t* tokens = ids ? checked<int32_t>(*ids, "ids", "[n]", 1) : nullptr;
    const int64_t n = extent(weights, 0);
    if (ids && extent(*ids, 0) != n) {
        bad_value("ids must have shape [n] = [" + std::to_string(n) + "], found " + shape_text(*ids));
    }
    return ddtree::draw_weights(values, tokens, n, {seed, position});
}

uint64_t noise_bits(uint64_t seed, int64_t position, int64_t token) {
    return ddtree::token_bits(ddtree::noise_state(seed, position), token);
}

nb::object gumbel(uint64_t seed, int64_t position, int64_t n) {
    if (n < 0) {
        bad_value("n must not be negative, found " + std::to_string(n));
    }
    std::unique_ptr<double[]> noise(new double[static_cast<size_t>(n)]);
    for (int64_t token = 0; token < n; ++token) {
        noise[static_cast<size_t>(token)] = ddtree::gumbel(noise_bits(seed, position, token));
    }
    return to_numpy(std::move(noise), {static_cast<size_t>(n)});
}

void compact_rows(const Input& bases, int64_t heads, int64_t head_stride_bytes, int64_t row_bytes, int64_t start,
                  const Input& keep, int64_t rows) {
    const uint64_t* addresses = checked<uint64_t>(bases, "bases", "[P]", 1);
    const int32_t* kept = checked<int32_t>(keep, "keep", "[m]", 1);
    const int64_t count = extent(bases, 0);
    const int64_t m = extent(keep, 0);
    if (heads < 1 || row_bytes < 1 || rows < 1) {
        bad_value("heads, row_bytes and rows must be positive");
    }
    if (heads > 1 && head_stride_bytes / row_bytes < rows) {
        bad_value("head_stride_bytes must be at least rows * row_bytes, found " + std::to_string(head_stride_bytes));
    }
    if (std::find(addresses, addresses + count, uint64_t{0}) != addresses + count) {
        bad_value("bases must not hold a null address");
    }
    if (start < 0) {
        bad_value("start must not be negative, found " + std::to_string(start));
    }
    for (int64_t j = 0; j < m; ++j) {
        if (kept[j] < 0 || (j > 0 && kept[j] <= kept[j - 1])) {
            bad_value("keep must be strictly increasing and not negative: keep[" + std::to_string(j) + "] is " +
                      std::to_string(kept[j]));
        }
    }
    if (m > 0 && kept[m - 1] >= rows - start) {
        bad_value("start + keep[-1] must be below rows: " + std::to_string(start) + " + " +
                  std::to_string(kept[m - 1]) + " is not below " + std::to_string(rows));
    }
    ddtree::compact_rows({addresses, count, heads, head_stride_bytes, row_bytes}, start, kept, m);
}

uint64_t attention_workspace_bound(int32_t sequences, int32_t tokens, int32_t q_heads, int32_t kv_heads,
                                   int32_t head_dim, int32_t capacity) {
    if (sequences < 1 || tokens < 1 || kv_heads < 1 || q_heads < kv_heads || q_heads % kv_heads || head_dim < 1 ||
        capacity < tokens) {
        bad_value(
            "sequences, tokens, heads and head_dim must be positive, q_heads a multiple of kv_heads, and tokens at "
            "most capacity");
    }
    return ddtree::most_partial_bytes({sequences, tokens, q_heads, kv_heads, head_dim, capacity, 0});
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Host part of ddtree-trt: tree build, masks, walk, budgets, sampling and KV row compaction. See "
              "_native.pyi for shapes.";
    ddtree::binding::bind_trees(m);
    m.def("acceptances", &acceptances, "log_weights"_a, "depths"_a, "ratios"_a);
    m.def("tried_mass", &tried_mass, "parents"_a, "log_weights"_a, "path"_a);
    m.def("learn", &learn, "evidence"_a, "mass"_a, "keep"_a);
    m.def("calibrated_ratios", &calibrated_ratios, "evidence"_a, "priors"_a.none(), "weight"_a, "lowest"_a, "highest"_a,
          "root"_a = 1.0);
    m.def("keep_nucleus", &keep_nucleus, "weights"_a, "share"_a);
    m.def("attention_workspace_bound", &attention_workspace_bound, "sequences"_a, "tokens"_a, "q_heads"_a, "kv_heads"_a,
          "head_dim"_a, "capacity"_a);
    m.def("draw_logits", &draw_logits, "logits"_a, "temperature"_a, "seed"_a, "position"_a);
    m.def("draw_weights", &draw_weights, "weights"_a, "seed"_a, "position"_a, "ids"_a.none() = nb::none());
    m.def("noise_bits", &noise_bits, "seed"_a, "position"_a, "token"_a);
    m.def("gumbel", &gumbel, "seed"_a, "position"_a, "n"_a);
    m.def("compact_rows", &compact_rows, "bases"_a, "heads"_a, "head_stride_bytes"_a, "row_bytes"_a, "start"_a,
          "keep"_a, "rows"_a);
}
