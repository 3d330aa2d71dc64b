// Python binding of the host part: checks NumPy's arrays, allocates the results, and nothing else. Trees are bound in
// tree_module.cpp.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "arrays.h"
#include "ddtree/attention_plan.h"
#include "ddtree/budget.h"
#include "ddtree/cpu_attention.h"
#include "ddtree/cpu_delta.h"
#include "ddtree/noise.h"
#include "ddtree/sampling.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace ddtree::binding;

namespace ddtree::binding {
void bind_trees(nb::module_& m);
}

namespace {

// Counts of an array [2, D]: observed, then predicted.
ddtree::Evidence checked_evidence(const Output& evidence) {
    double* counts = checked<double>(evidence, "evidence", "[2, D]", 2);
    if (evidence.shape(0) != 2) {
        bad_value("evidence must have shape [2, D], found " + shape_text(evidence));
    }
    const auto deepest = static_cast<int64_t>(evidence.shape(1));
    return {counts, counts + deepest, deepest};
}

ddtree::Prior checked_prior(double weight, double highest, double root) {
    if (!(weight > 0) || !(highest >= 0)) {
        bad_value("weight must be positive and highest not negative");
    }
    return {weight, highest, root};
}

nb::object calibrated_ratios(const Output& evidence, double weight, double highest, double root) {
    return copied(ddtree::calibrated_ratios(checked_evidence(evidence), checked_prior(weight, highest, root)));
}

nb::list weigh(const nb::sequence& drafts, const Input& sizes, double weight, double highest) {
    const ddtree::Prior prior = checked_prior(weight, highest, 1.0);
    const int64_t* bounds = checked<int64_t>(sizes, "sizes", "[W + 1]", 1);
    const int64_t w = extent(sizes, 0) - 1;
    if (w < 0 || bounds[0] < 0 || !std::is_sorted(bounds, bounds + w + 1)) {
        bad_value("sizes must be W + 1 rising numbers of nodes, found shape " + shape_text(sizes));
    }
    nb::list found;
    for (const nb::handle draft : drafts) {
        const auto [log_weights, depths, evidence, deepest, means, share] =
            nb::cast<std::tuple<Input, Input, Output, int64_t, Output, double>>(draft);
        const auto ratios = ddtree::calibrated_ratios(checked_evidence(evidence), prior);
        const double* weights = checked<double>(log_weights, "log_weights", "[n]", 1);
        const int32_t* levels = checked<int32_t>(depths, "depths", "[n]", 1);
        double* followed = checked<double>(means, "means", "[W]", 1);
        const int64_t n = extent(log_weights, 0);
        const auto known = static_cast<int64_t>(ratios.size());
        if (extent(depths, 0) != n || static_cast<int64_t>(means.shape(0)) != w) {
            bad_value("weigh needs n depths for n log_weights and W means for W + 1 sizes, found " +
                      shape_text(depths) + " and " + shape_text(means));
        }
        if (std::any_of(levels, levels + n, [&](int32_t d) { return d < 1 || d > known; })) {
            bad_value("depths must be 1 ... D with evidence for each: evidence has shape " + shape_text(evidence));
        }
        std::unique_ptr<double[]> accepted(new double[static_cast<size_t>(n)]);
        ddtree::acceptances(weights, levels, n, ratios, deepest, accepted.get());
        ddtree::follow(accepted.get(), n, bounds, w, share, followed);
        found.append(to_numpy(std::move(accepted), {static_cast<size_t>(n)}));
    }
    return found;
}

void learn(const Output& evidence, const Input& parents, const Input& log_weights, const Input& path, double keep) {
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
    ddtree::learn(tree, weights, n, walked, m, keep, checked_evidence(evidence));
}

nb::tuple best_size(const nb::sequence& gains, const Input& added_s, double tokens, double seconds) {
    const double* costs = checked<double>(added_s, "added_s", "[m]", 1);
    std::vector<double> total;
    for (const nb::handle each : gains) {
        const auto gain = nb::cast<Input>(each);
        const double* expected = checked<double>(gain, "gains", "[n]", 1);
        total.resize(std::max(total.size(), gain.shape(0)));
        for (size_t i = 0; i < gain.shape(0); ++i) total[i] += expected[i];
    }
    if (total.size() > added_s.shape(0) || !(seconds > 0)) {
        bad_value("best_size needs added_s for every gain and positive seconds, found " + std::to_string(total.size()) +
                  " gains and added_s " + shape_text(added_s));
    }
    const ddtree::Size best =
        ddtree::best_size(total.data(), static_cast<int64_t>(total.size()), costs, tokens, seconds);
    return nb::make_tuple(best.size, best.rate);
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

ddtree::cpu::CacheShape checked_cache(int64_t kv_heads, int64_t head_dim, int64_t rows, bool half) {
    if (kv_heads < 1 || head_dim < 1 || rows < 1 || rows % ddtree::cpu::UNIT) {
        bad_value("kv_heads, head_dim and rows must be positive, and rows a multiple of " +
                  std::to_string(ddtree::cpu::UNIT));
    }
    return {kv_heads, head_dim, rows, half ? ddtree::cpu::Stored::BFLOAT16 : ddtree::cpu::Stored::FLOAT};
}

void compact_cache(const Output& cache, int64_t slot, int64_t head_dim, int64_t rows, bool half, int64_t start,
                   const Input& keep) {
    unsigned char* layers = checked<uint8_t>(cache, "cache", "[layers, slots, Hkv, bytes]", 4);
    const auto shape = checked_cache(static_cast<int64_t>(cache.shape(2)), head_dim, rows, half);
    const int32_t* kept = checked<int32_t>(keep, "keep", "[m]", 1);
    const int64_t m = extent(keep, 0);
    if (static_cast<int64_t>(cache.shape(3)) != shape.head_bytes()) {
        bad_value("cache must have " + std::to_string(shape.head_bytes()) + " bytes a head, found " +
                  shape_text(cache));
    }
    if (slot < 0 || slot >= static_cast<int64_t>(cache.shape(1)) || start < 0) {
        bad_value("slot and start must not be negative, and slot be one of the cache's");
    }
    for (int64_t j = 0; j < m; ++j) {
        if (kept[j] < 0 || (j > 0 && kept[j] <= kept[j - 1]) || kept[j] >= rows - start) {
            bad_value("keep must be strictly increasing, not negative, and within the rows: keep[" + std::to_string(j) +
                      "] is " + std::to_string(kept[j]));
        }
    }
    for (size_t layer = 0; layer < cache.shape(0); ++layer) {
        const size_t at = layer * cache.shape(1) + static_cast<size_t>(slot);
        ddtree::cpu::compact(shape, layers + at * static_cast<size_t>(shape.slot_bytes()), start, kept, m);
    }
}

void commit_delta(const Output& states, const Input& moves, int64_t slot, const Input& rows, int64_t key_heads,
                  int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t taps) {
    if (key_heads < 1 || value_heads < 1 || value_heads % key_heads || key_dim < 1 || key_dim % 16 || value_dim < 1 ||
        value_dim % 16 || taps < 2 || taps > 16) {
        bad_value("heads must be positive, sizes of heads multiples of 16, and taps 2 to 16");
    }
    const ddtree::cpu::DeltaShape shape{key_heads, value_heads, key_dim, value_dim, taps};
    float* layers = checked<float>(states, "states", "[layers, slots, values]", 3);
    const float* moved = checked<float>(moves, "moves", "[layers, T, values]", 3);
    const int32_t* path = checked<int32_t>(rows, "rows", "[m]", 1);
    const auto n = static_cast<int64_t>(states.shape(0)), slots = static_cast<int64_t>(states.shape(1));
    if (static_cast<int64_t>(states.shape(2)) != shape.state_values() || extent(moves, 0) != n ||
        extent(moves, 2) != shape.moved_values() || slot < 0 || slot >= slots) {
        bad_value("states and moves must fit the heads and the slot, found " + shape_text(states) + " and " +
                  shape_text(moves));
    }
    for (int64_t j = 0; j < extent(rows, 0); ++j) {
        if (path[j] < 0 || path[j] >= extent(moves, 1)) {
            bad_value("rows must be those of moves: rows[" + std::to_string(j) + "] is " + std::to_string(path[j]));
        }
    }
    for (int64_t layer = 0; layer < n; ++layer) {
        ddtree::cpu::delta_commit(shape, layers + (layer * slots + slot) * shape.state_values(),
                                  moved + layer * extent(moves, 1) * shape.moved_values(), path, extent(rows, 0));
    }
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
    m.attr("STUB") = DDTREE_STUB;
    ddtree::binding::bind_trees(m);
    m.def("calibrated_ratios", &calibrated_ratios, "evidence"_a, "weight"_a, "highest"_a, "root"_a = 1.0);
    m.def("weigh", &weigh, "drafts"_a, "sizes"_a, "weight"_a, "highest"_a);
    m.def("learn", &learn, "evidence"_a, "parents"_a, "log_weights"_a, "path"_a, "keep"_a);
    m.def("best_size", &best_size, "gains"_a, "added_s"_a, "tokens"_a, "seconds"_a);
    m.def("keep_nucleus", &keep_nucleus, "weights"_a, "share"_a);
    m.def("attention_workspace_bound", &attention_workspace_bound, "sequences"_a, "tokens"_a, "q_heads"_a, "kv_heads"_a,
          "head_dim"_a, "capacity"_a);
    m.def("draw_logits", &draw_logits, "logits"_a, "temperature"_a, "seed"_a, "position"_a);
    m.def("draw_weights", &draw_weights, "weights"_a, "seed"_a, "position"_a, "ids"_a.none() = nb::none());
    m.def("noise_bits", &noise_bits, "seed"_a, "position"_a, "token"_a);
    m.def("gumbel", &gumbel, "seed"_a, "position"_a, "n"_a);
    m.def("compact_cache", &compact_cache, "cache"_a, "slot"_a, "head_dim"_a, "rows"_a, "half"_a, "start"_a, "keep"_a);
    m.def("commit_delta", &commit_delta, "states"_a, "moves"_a, "slot"_a, "rows"_a, "key_heads"_a, "value_heads"_a,
          "key_dim"_a, "value_dim"_a, "taps"_a);
    m.def("attention_isa", &ddtree::cpu::attention_isa);
}
