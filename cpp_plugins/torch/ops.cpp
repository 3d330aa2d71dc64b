// torch.ops.ddtree: the launchers on tensors. Checks the tensors' device, type, layout and extents, and leaves the rest
// to the launchers. Every operator writes into its arguments and allocates no tensor, so all of them can be captured
// into a CUDA graph.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#ifndef DDTREE_EMULATE
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <initializer_list>
#include <optional>

#include "ddtree/abi.h"
#include "ddtree/attention.h"
#include "ddtree/delta.h"
#include "ddtree/draft.h"
#include "ddtree/pointwise.h"
#include "ddtree/round.h"

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

[[maybe_unused]] __attribute__((used)) const char kMarker[] = DDTREE_ABI_MARKER;

#ifdef DDTREE_EMULATE
struct OnDevice {  // the emulated kernels work on CPU tensors
    explicit OnDevice(const Tensor&) {}
    ddtree::Stream stream() const { return nullptr; }
};
#else
struct OnDevice {
    explicit OnDevice(const Tensor& tensor) : guard(tensor.device()) {}
    ddtree::Stream stream() const { return c10::cuda::getCurrentCUDAStream().stream(); }
    c10::cuda::CUDAGuard guard;
};
#endif

// The device must be that of `like`; -1 in `shape` accepts any extent.
void check(const Tensor& tensor, const char* name, at::ScalarType type, const Tensor& like,
           std::initializer_list<int64_t> shape) {
    TORCH_CHECK(tensor.device() == like.device(), name, " must be on ", like.device(), ", found ", tensor.device());
    TORCH_CHECK(tensor.scalar_type() == type, name, " must be ", type, ", found ", tensor.scalar_type());
    TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
    bool fits = tensor.dim() == static_cast<int64_t>(shape.size());
    size_t i = 0;
    for (const int64_t wanted : shape) {
        fits = fits && (wanted < 0 || tensor.size(i) == wanted);
        ++i;
    }
    TORCH_CHECK(fits, name, " must have shape ", at::IntArrayRef(shape), " (-1 for any), found ", tensor.sizes());
}

template <typename T>
T* pointer(const OptionalTensor& tensor) {
    return tensor ? static_cast<T*>(tensor->data_ptr()) : nullptr;
}
template <typename T>
T* pointer(const Tensor& tensor) {
    return static_cast<T*>(tensor.data_ptr());
}
int32_t size(const Tensor& tensor, int64_t dimension) { return static_cast<int32_t>(tensor.size(dimension)); }

void raise(const char* name, ddtree::Status status) {
    TORCH_CHECK(status == ddtree::Status::ok, "ddtree::", name, " refused its arguments with status ",
                static_cast<int>(status), " (see include/ddtree/launch.h)");
}

ddtree::TreeAttention shaped(const Tensor& q, const Tensor& cache_k, int64_t mask_words, int64_t mask_mode,
                             double scale, int64_t splits) {
    TORCH_CHECK(q.dim() == 4 && cache_k.dim() == 4, "q must be [N, T, Hq, D] and cache_k [slots, Hkv, S, D]");
    ddtree::TreeAttention call{};
    call.sequences = size(q, 0);
    call.tokens = size(q, 1);
    call.q_heads = size(q, 2);
    call.head_dim = size(q, 3);
    call.slots = size(cache_k, 0);
    call.kv_heads = size(cache_k, 1);
    call.capacity = size(cache_k, 2);
    call.mask_words = static_cast<int32_t>(mask_words);
    call.type = q.scalar_type() == at::kBFloat16 ? ddtree::ElementType::bf16 : ddtree::ElementType::fp16;
    call.mask_mode = static_cast<ddtree::MaskMode>(mask_mode);
    call.scale = static_cast<float>(scale);
    call.splits = static_cast<int32_t>(splits);
    return call;
}

int64_t attention_workspace_bytes(const Tensor& q, const Tensor& cache_k, int64_t mask_words, int64_t mask_mode,
                                  double scale, int64_t splits) {
    return static_cast<int64_t>(
        ddtree::attention_workspace_bytes(shaped(q, cache_k, mask_words, mask_mode, scale, splits)));
}

void tree_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cache_k, const Tensor& cache_v,
                    const Tensor& slot_ids, const Tensor& past_len, const OptionalTensor& tree_mask, int64_t mask_mode,
                    double scale, const Tensor& out, const Tensor& workspace, int64_t splits) {
    const auto type = q.scalar_type();
    TORCH_CHECK(type == at::kBFloat16 || type == at::kHalf, "q must be bfloat16 or float16, found ", type);
    ddtree::TreeAttention call = shaped(q, cache_k, tree_mask ? tree_mask->size(-1) : 0, mask_mode, scale, splits);
    const int64_t n = call.sequences, t = call.tokens, hkv = call.kv_heads, d = call.head_dim;
    check(q, "q", type, q, {n, t, call.q_heads, d});
    check(k, "k", type, q, {n, t, hkv, d});
    check(v, "v", type, q, {n, t, hkv, d});
    check(cache_k, "cache_k", type, q, {call.slots, hkv, call.capacity, d});
    check(cache_v, "cache_v", type, q, {call.slots, hkv, call.capacity, d});
    check(slot_ids, "slot_ids", at::kInt, q, {n});
    check(past_len, "past_len", at::kInt, q, {n});
    if (tree_mask) {
        check(*tree_mask, "tree_mask", at::kInt, q, {n, t, call.mask_words});
    }
    check(out, "out", type, q, {n, t, call.q_heads, d});
    check(workspace, "workspace", at::kByte, q, {-1});
    call.q = pointer<const void>(q);
    call.k = pointer<const void>(k);
    call.v = pointer<const void>(v);
    call.past_k = call.present_k = pointer<void>(cache_k);
    call.past_v = call.present_v = pointer<void>(cache_v);
    call.slot_ids = pointer<const int32_t>(slot_ids);
    call.past_len = pointer<const int32_t>(past_len);
    call.tree_mask = pointer<const int32_t>(tree_mask);
    call.out = pointer<void>(out);
    call.workspace = pointer<void>(workspace);
    call.workspace_bytes = static_cast<size_t>(workspace.numel());
    const OnDevice device(q);
    raise("tree_attention", ddtree::tree_attention(call, device.stream()));
}

void draft_top(const Tensor& logits, bool normalised, const Tensor& best, const Tensor& ids) {
    TORCH_CHECK(logits.dim() == 2 && best.dim() == 2, "logits must be [R, V] and best [R, K]");
    check(logits, "logits", at::kFloat, logits, {-1, -1});
    check(best, "best", at::kFloat, logits, {logits.size(0), -1});
    check(ids, "ids", at::kInt, logits, {best.size(0), best.size(1)});
    const OnDevice device(logits);
    raise("draft_top", ddtree::draft_top({pointer<const float>(logits), pointer<float>(best), pointer<int32_t>(ids),
                                          size(logits, 0), size(logits, 1), size(best, 1), normalised ? 1 : 0},
                                         device.stream()));
}

void build_tree(const Tensor& log_probs, const Tensor& candidates, const Tensor& root_tokens,
                const OptionalTensor& budgets, const OptionalTensor& past_len, const Tensor& token_ids,
                const Tensor& parents, const Tensor& depths, const OptionalTensor& positions, const Tensor& counts,
                const OptionalTensor& log_weights, const OptionalTensor& outlook_depths) {
    TORCH_CHECK(log_probs.dim() == 3 && token_ids.dim() == 2, "log_probs must be [N, L, K] and token_ids [N, T]");
    const int64_t n = log_probs.size(0), t = token_ids.size(1);
    check(log_probs, "log_probs", at::kFloat, log_probs, {n, -1, -1});
    check(candidates, "candidates", at::kInt, log_probs, {n, log_probs.size(1), log_probs.size(2)});
    check(root_tokens, "root_tokens", at::kInt, log_probs, {n});
    for (const auto& [tensor, name] : {std::pair(&budgets, "budgets"), std::pair(&past_len, "past_len")}) {
        if (*tensor) {
            check(**tensor, name, at::kInt, log_probs, {n});
        }
    }
    for (const auto& [tensor, name] :
         {std::pair(&token_ids, "token_ids"), std::pair(&parents, "parents"), std::pair(&depths, "depths")}) {
        check(*tensor, name, at::kInt, log_probs, {n, t});
    }
    if (positions) {
        check(*positions, "positions", at::kInt, log_probs, {n, t});
    }
    check(counts, "counts", at::kInt, log_probs, {n});
    TORCH_CHECK(log_weights.has_value() == outlook_depths.has_value(), "an outlook is log_weights and outlook_depths");
    if (log_weights) {
        check(*log_weights, "log_weights", at::kFloat, log_probs, {n, -1});
        check(*outlook_depths, "outlook_depths", at::kInt, log_probs, {n, log_weights->size(1)});
    }
    const OnDevice device(log_probs);
    ddtree::TreeBuild call{};
    call.log_probs = pointer<const float>(log_probs);
    call.candidates = pointer<const int32_t>(candidates);
    call.root_tokens = pointer<const int32_t>(root_tokens);
    call.budgets = pointer<const int32_t>(budgets);
    call.past_len = pointer<const int32_t>(past_len);
    call.token_ids = pointer<int32_t>(token_ids);
    call.parents = pointer<int32_t>(parents);
    call.depths = pointer<int32_t>(depths);
    call.positions = pointer<int32_t>(positions);
    call.counts = pointer<int32_t>(counts);
    call.log_weights = pointer<float>(log_weights);
    call.outlook_depths = pointer<int32_t>(outlook_depths);
    call.sequences = size(log_probs, 0);
    call.positions_l = size(log_probs, 1);
    call.candidates_k = size(log_probs, 2);
    call.tokens = size(token_ids, 1);
    call.outlook = log_weights ? size(*log_weights, 1) : 0;
    raise("build_tree", ddtree::device_build_tree(call, device.stream()));
}

void packed_mask(const Tensor& parents, const Tensor& mask) {
    TORCH_CHECK(parents.dim() == 2 && mask.dim() == 3, "parents must be [N, T] and mask [N, T, W]");
    check(parents, "parents", at::kInt, parents, {-1, -1});
    check(mask, "mask", at::kInt, parents, {parents.size(0), parents.size(1), -1});
    const OnDevice device(parents);
    raise("packed_mask", ddtree::device_packed_mask({pointer<const int32_t>(parents), pointer<int32_t>(mask),
                                                     size(parents, 0), size(parents, 1), size(mask, 2)},
                                                    device.stream()));
}

void choose(const Tensor& logits, const Tensor& positions, const Tensor& temperatures, const Tensor& seeds,
            const Tensor& choices) {
    TORCH_CHECK(positions.dim() == 2, "positions must be [N, T]");
    const int64_t n = positions.size(0), t = positions.size(1);
    check(logits, "logits", at::kFloat, logits, {n, t, -1});
    check(positions, "positions", at::kInt, logits, {n, t});
    check(temperatures, "temperatures", at::kFloat, logits, {n});
    check(seeds, "seeds", at::kLong, logits, {n});
    check(choices, "choices", at::kInt, logits, {n, t});
    const OnDevice device(logits);
    raise("choose",
          ddtree::device_choose({pointer<const float>(logits), pointer<const int32_t>(positions),
                                 pointer<const float>(temperatures), pointer<const int64_t>(seeds),
                                 pointer<int32_t>(choices), size(positions, 0), size(positions, 1), size(logits, 2)},
                                device.stream()));
}

void commit(const Tensor& parents, const Tensor& token_ids, const Tensor& choices, const Tensor& counts,
            const Tensor& log_weights, const Tensor& outlook_depths, const Tensor& slot_ids, const Tensor& holds,
            const Tensor& active, const Tensor& before, const Tensor& tapped, const Tensor& cache,
            const Tensor& waiting, const Tensor& states, const Tensor& result) {
    TORCH_CHECK(parents.dim() == 2 && cache.dim() == 5 && waiting.dim() == 3 && result.dim() == 2,
                "parents must be [N, T], cache [planes, slots, Hkv, S, D], waiting [slots, B, W] and result [N, R]");
    const int64_t n = parents.size(0), t = parents.size(1), o = log_weights.size(-1);
    const int64_t slots = cache.size(1), width = waiting.size(2), longest = result.size(1) / 2 - 1 - t - o;
    for (const auto& [tensor, name] :
         {std::pair(&parents, "parents"), std::pair(&token_ids, "token_ids"), std::pair(&choices, "choices")}) {
        check(*tensor, name, at::kInt, parents, {n, t});
    }
    for (const auto& [tensor, name] : {std::pair(&counts, "counts"), std::pair(&slot_ids, "slot_ids"),
                                       std::pair(&holds, "holds"), std::pair(&active, "active")}) {
        check(*tensor, name, at::kInt, parents, {n});
    }
    check(log_weights, "log_weights", at::kFloat, parents, {n, o});
    check(outlook_depths, "outlook_depths", at::kInt, parents, {n, o});
    check(before, "before", at::kInt, parents, {4, n});
    check(tapped, "tapped", waiting.scalar_type(), parents, {n, t, width});
    check(cache, "cache", cache.scalar_type(), parents, {-1, -1, -1, -1, -1});
    check(waiting, "waiting", waiting.scalar_type(), parents, {slots, -1, -1});
    check(states, "states", at::kInt, parents, {4, slots});
    check(result, "result", at::kInt, parents, {n, 2 * (1 + longest + t + o)});
    const OnDevice device(parents);
    ddtree::RoundCommit call{};
    call.parents = pointer<const int32_t>(parents);
    call.token_ids = pointer<const int32_t>(token_ids);
    call.choices = pointer<const int32_t>(choices);
    call.counts = pointer<const int32_t>(counts);
    call.log_weights = pointer<const float>(log_weights);
    call.outlook_depths = pointer<const int32_t>(outlook_depths);
    call.slot_ids = pointer<const int32_t>(slot_ids);
    call.holds = pointer<const int32_t>(holds);
    call.active = pointer<const int32_t>(active);
    call.before = pointer<const int32_t>(before);
    call.tapped = pointer<const void>(tapped);
    call.cache = pointer<void>(cache);
    call.waiting = pointer<void>(waiting);
    call.states = pointer<int32_t>(states);
    call.result = pointer<int32_t>(result);
    call.sequences = static_cast<int32_t>(n);
    call.tokens = static_cast<int32_t>(t);
    call.longest = static_cast<int32_t>(longest);
    call.outlook = static_cast<int32_t>(o);
    call.planes = size(cache, 0);
    call.slots = size(cache, 1);
    call.kv_heads = size(cache, 2);
    call.capacity = size(cache, 3);
    call.waiting_rows = size(waiting, 1);
    call.row_bytes = static_cast<int32_t>(cache.size(4) * cache.element_size());
    call.state_bytes = static_cast<int32_t>(width * waiting.element_size());
    raise("commit", ddtree::device_commit(call, device.stream()));
}

void compact(const Tensor& cache, const Tensor& slot_ids, const Tensor& past_len, const Tensor& keep,
             const Tensor& keep_count) {
    TORCH_CHECK(cache.dim() == 5 && keep.dim() == 2, "cache must be [planes, slots, Hkv, S, D] and keep [N, M]");
    TORCH_CHECK(cache.is_contiguous(), "cache must be contiguous");
    const int64_t n = keep.size(0);
    check(slot_ids, "slot_ids", at::kInt, cache, {n});
    check(past_len, "past_len", at::kInt, cache, {n});
    check(keep, "keep", at::kInt, cache, {n, -1});
    check(keep_count, "keep_count", at::kInt, cache, {n});
    const OnDevice device(cache);
    ddtree::KvCompact call{};
    call.cache = pointer<void>(cache);
    call.slot_ids = pointer<const int32_t>(slot_ids);
    call.past_len = pointer<const int32_t>(past_len);
    call.keep = pointer<const int32_t>(keep);
    call.keep_count = pointer<const int32_t>(keep_count);
    call.sequences = size(keep, 0);
    call.planes = size(cache, 0);
    call.slots = size(cache, 1);
    call.kv_heads = size(cache, 2);
    call.capacity = size(cache, 3);
    call.max_keep = size(keep, 1);
    call.row_bytes = static_cast<int32_t>(cache.size(4) * cache.element_size());
    raise("compact", ddtree::device_compact(call, device.stream()));
}

void delta_tree(const Tensor& mixed, const Tensor& log_decays, const Tensor& steps, const Tensor& parents,
                const Tensor& states, const Tensor& slot_ids, const Tensor& out, const Tensor& keys,
                const Tensor& updates, const Tensor& decays) {
    TORCH_CHECK(mixed.dim() == 3 && states.dim() == 4 && keys.dim() == 4,
                "mixed must be [N, T, C], states [slots, Hv, Dk, Dv] and keys [N, T, Hk, Dk]");
    const int64_t n = mixed.size(0), t = mixed.size(1), hk = keys.size(2);
    const int64_t hv = states.size(1), dk = states.size(2), dv = states.size(3);
    check(mixed, "mixed", at::kFloat, mixed, {n, t, 2 * hk * dk + hv * dv});
    check(log_decays, "log_decays", at::kFloat, mixed, {n, t, hv});
    check(steps, "steps", at::kFloat, mixed, {n, t, hv});
    check(parents, "parents", at::kInt, mixed, {n, t});
    check(states, "states", at::kFloat, mixed, {-1, -1, -1, -1});
    check(slot_ids, "slot_ids", at::kInt, mixed, {n});
    check(out, "out", at::kFloat, mixed, {n, t, hv, dv});
    check(keys, "keys", at::kFloat, mixed, {n, t, -1, dk});
    check(updates, "updates", at::kFloat, mixed, {n, t, hv, dv});
    check(decays, "decays", at::kDouble, mixed, {n, t, hv});
    const OnDevice device(mixed);
    raise("delta_tree", ddtree::delta_tree(
                            {pointer<const float>(mixed), pointer<const float>(log_decays), pointer<const float>(steps),
                             pointer<const int32_t>(parents), pointer<const float>(states),
                             pointer<const int32_t>(slot_ids), pointer<float>(out), pointer<float>(keys),
                             pointer<float>(updates), pointer<double>(decays), size(mixed, 0), size(mixed, 1),
                             size(states, 0), size(keys, 2), size(states, 1), size(states, 2), size(states, 3)},
                            device.stream()));
}

ddtree::ElementType element_type(const Tensor& tensor, const char* name) {
    const auto type = tensor.scalar_type();
    TORCH_CHECK(type == at::kBFloat16 || type == at::kHalf, name, " must be bfloat16 or float16, found ", type);
    return type == at::kBFloat16 ? ddtree::ElementType::bf16 : ddtree::ElementType::fp16;
}

void add_rms_norm(const Tensor& x, const OptionalTensor& update, const Tensor& weight, double epsilon,
                  const OptionalTensor& sum, const Tensor& normed) {
    TORCH_CHECK(x.dim() == 2, "x must be [rows, width]");
    const auto type = x.scalar_type();
    const int64_t rows = x.size(0), width = x.size(1);
    check(x, "x", type, x, {rows, width});
    check(weight, "weight", type, x, {width});
    check(normed, "normed", type, x, {rows, width});
    for (const auto& [tensor, name] : {std::pair(&update, "update"), std::pair(&sum, "sum")}) {
        if (*tensor) {
            check(**tensor, name, type, x, {rows, width});
        }
    }
    const OnDevice device(x);
    ddtree::AddNorm call{};
    call.x = pointer<const void>(x);
    call.update = pointer<const void>(update);
    call.weight = pointer<const void>(weight);
    call.sum = pointer<void>(sum);
    call.normed = pointer<void>(normed);
    call.rows = size(x, 0);
    call.width = size(x, 1);
    call.type = element_type(x, "x");
    call.epsilon = static_cast<float>(epsilon);
    raise("add_rms_norm", ddtree::add_rms_norm(call, device.stream()));
}

void split_qkv(const Tensor& qkv, const Tensor& q_norm, const Tensor& k_norm, const Tensor& tables,
               const Tensor& positions, double epsilon, const Tensor& q, const Tensor& k, const Tensor& v) {
    TORCH_CHECK(q.dim() == 3 && k.dim() == 3, "q must be [rows, Hq, D] and k [rows, Hkv, D]");
    const auto type = qkv.scalar_type();
    const int64_t rows = q.size(0), hq = q.size(1), hkv = k.size(1), d = q.size(2);
    check(qkv, "qkv", type, qkv, {rows, hq + 2 * hkv, d});
    check(q, "q", type, qkv, {rows, hq, d});
    check(k, "k", type, qkv, {rows, hkv, d});
    check(v, "v", type, qkv, {rows, hkv, d});
    check(q_norm, "q_norm", type, qkv, {d});
    check(k_norm, "k_norm", type, qkv, {d});
    check(tables, "tables", at::kFloat, qkv, {2, -1, d});
    check(positions, "positions", at::kInt, qkv, {rows});
    const OnDevice device(qkv);
    ddtree::SplitQkv call{};
    call.qkv = pointer<const void>(qkv);
    call.q_norm = pointer<const void>(q_norm);
    call.k_norm = pointer<const void>(k_norm);
    call.tables = pointer<const float>(tables);
    call.positions = pointer<const int32_t>(positions);
    call.q = pointer<void>(q);
    call.k = pointer<void>(k);
    call.v = pointer<void>(v);
    call.rows = size(q, 0);
    call.q_heads = size(q, 1);
    call.kv_heads = size(k, 1);
    call.head_dim = size(q, 2);
    call.table_rows = size(tables, 1);
    call.type = element_type(qkv, "qkv");
    call.epsilon = static_cast<float>(epsilon);
    raise("split_qkv", ddtree::split_qkv(call, device.stream()));
}

void swiglu(const Tensor& gate_up, const Tensor& out) {
    TORCH_CHECK(out.dim() == 2, "out must be [rows, inner]");
    const auto type = out.scalar_type();
    check(gate_up, "gate_up", type, out, {out.size(0), 2 * out.size(1)});
    check(out, "out", type, out, {-1, -1});
    const OnDevice device(out);
    raise("swiglu", ddtree::swiglu({pointer<const void>(gate_up), pointer<void>(out), size(out, 0), size(out, 1),
                                    element_type(out, "out")},
                                   device.stream()));
}

void delta_commit(const Tensor& states, const Tensor& past, const Tensor& keys, const Tensor& updates,
                  const Tensor& decays, const Tensor& inputs, const OptionalTensor& path, int64_t first, int64_t rows,
                  int64_t slot) {
    TORCH_CHECK(states.dim() == 5 && past.dim() == 4 && keys.dim() == 4,
                "states must be [L, slots, Hv, Dk, Dv], past [L, slots, W - 1, C] and keys [L, R, Hk, Dk]");
    const int64_t layers = states.size(0), all = keys.size(1), hk = keys.size(2);
    const int64_t hv = states.size(2), dk = states.size(3), dv = states.size(4), channels = 2 * hk * dk + hv * dv;
    check(states, "states", at::kFloat, states, {-1, -1, -1, -1, -1});
    check(past, "past", at::kFloat, states, {layers, states.size(1), -1, channels});
    check(keys, "keys", at::kFloat, states, {layers, -1, -1, dk});
    check(updates, "updates", at::kFloat, states, {layers, all, hv, dv});
    check(decays, "decays", at::kDouble, states, {layers, all, hv});
    check(inputs, "inputs", inputs.scalar_type(), states, {layers, all, channels});
    if (path) {
        check(*path, "path", at::kInt, states, {rows});
    }
    const bool single = inputs.scalar_type() == at::kFloat;
    const OnDevice device(states);
    ddtree::DeltaCommit call{};
    call.states = pointer<float>(states);
    call.past = pointer<float>(past);
    call.keys = pointer<const float>(keys);
    call.updates = pointer<const float>(updates);
    call.decays = pointer<const double>(decays);
    call.inputs = pointer<const void>(inputs);
    call.path = pointer<const int32_t>(path);
    call.first = static_cast<int32_t>(first);
    call.path_rows = static_cast<int32_t>(rows);
    call.slot = static_cast<int32_t>(slot);
    call.slots = size(states, 1);
    call.layers = size(states, 0);
    call.rows = size(keys, 1);
    call.key_heads = size(keys, 2);
    call.value_heads = size(states, 2);
    call.key_dim = size(states, 3);
    call.value_dim = size(states, 4);
    call.past_rows = size(past, 2);
    call.single = single ? 1 : 0;
    call.type = single ? ddtree::ElementType::bf16 : element_type(inputs, "inputs");
    raise("delta_commit", ddtree::delta_commit(call, device.stream()));
}

}  // namespace

TORCH_LIBRARY(ddtree, m) {
    m.def("attention_workspace_bytes(Tensor q, Tensor cache_k, int mask_words, int mask_mode, float scale, "
          "int splits=0) -> int");
    m.def("tree_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) cache_k, Tensor(b!) cache_v, Tensor slot_ids, "
          "Tensor past_len, Tensor? tree_mask, int mask_mode, float scale, Tensor(c!) out, Tensor(d!) workspace, "
          "int splits=0) -> ()");
    m.def("draft_top(Tensor logits, bool normalised, Tensor(a!) best, Tensor(b!) ids) -> ()");
    m.def("build_tree(Tensor log_probs, Tensor candidates, Tensor root_tokens, Tensor? budgets, Tensor? past_len, "
          "Tensor(a!) token_ids, Tensor(b!) parents, Tensor(c!) depths, Tensor(d!)? positions, Tensor(e!) counts, "
          "Tensor(f!)? log_weights=None, Tensor(g!)? outlook_depths=None) -> ()");
    m.def("packed_mask(Tensor parents, Tensor(a!) mask) -> ()");
    m.def("choose(Tensor logits, Tensor positions, Tensor temperatures, Tensor seeds, Tensor(a!) choices) -> ()");
    m.def("commit(Tensor parents, Tensor token_ids, Tensor choices, Tensor counts, Tensor log_weights, "
          "Tensor outlook_depths, Tensor slot_ids, Tensor holds, Tensor active, Tensor before, Tensor tapped, "
          "Tensor(a!) cache, Tensor(b!) waiting, Tensor(c!) states, Tensor(d!) result) -> ()");
    m.def("compact(Tensor(a!) cache, Tensor slot_ids, Tensor past_len, Tensor keep, Tensor keep_count) -> ()");
    m.def("add_rms_norm(Tensor x, Tensor? update, Tensor weight, float epsilon, Tensor(a!)? sum, Tensor(b!) normed) "
          "-> ()");
    m.def("split_qkv(Tensor qkv, Tensor q_norm, Tensor k_norm, Tensor tables, Tensor positions, float epsilon, "
          "Tensor(a!) q, Tensor(b!) k, Tensor(c!) v) -> ()");
    m.def("swiglu(Tensor gate_up, Tensor(a!) out) -> ()");
    m.def("delta_tree(Tensor mixed, Tensor log_decays, Tensor steps, Tensor parents, Tensor states, Tensor slot_ids, "
          "Tensor(a!) out, Tensor(b!) keys, Tensor(c!) updates, Tensor(d!) decays) -> ()");
    m.def("delta_commit(Tensor(a!) states, Tensor(b!) past, Tensor keys, Tensor updates, Tensor decays, Tensor inputs, "
          "Tensor? path, int first, int rows, int slot) -> ()");
}

#ifdef DDTREE_EMULATE
TORCH_LIBRARY_IMPL(ddtree, CPU, m) {
#else
TORCH_LIBRARY_IMPL(ddtree, CUDA, m) {
#endif
    m.impl("attention_workspace_bytes", attention_workspace_bytes);
    m.impl("tree_attention", tree_attention);
    m.impl("draft_top", draft_top);
    m.impl("build_tree", build_tree);
    m.impl("packed_mask", packed_mask);
    m.impl("choose", choose);
    m.impl("commit", commit);
    m.impl("compact", compact);
    m.impl("add_rms_norm", add_rms_norm);
    m.impl("split_qkv", split_qkv);
    m.impl("swiglu", swiglu);
    m.impl("delta_tree", delta_tree);
    m.impl("delta_commit", delta_commit);
}
