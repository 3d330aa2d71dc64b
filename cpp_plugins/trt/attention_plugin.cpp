#include "attention_plugin.h"

#include <algorithm>

namespace ddtree::trt {

namespace {

using nvinfer1::PluginFieldType;

// Name, place and type of every attribute. The last is stored in plans and no attribute of a node.
std::vector<PluginField> fields_of(const AttentionAttributes& a) {
    return {{"num_q_heads", &a.num_q_heads, PluginFieldType::kINT32, 1},
            {"num_kv_heads", &a.num_kv_heads, PluginFieldType::kINT32, 1},
            {"head_dim", &a.head_dim, PluginFieldType::kINT32, 1},
            {"max_tree", &a.max_tree, PluginFieldType::kINT32, 1},
            {"scale", &a.scale, PluginFieldType::kFLOAT32, 1},
            {"mask_mode", &a.mask_mode, PluginFieldType::kINT32, 1},
            {"workspace_bytes", &a.workspace_bytes, PluginFieldType::kINT64, 1}};
}

// The one value of an attribute, for which the ONNX parser and the engine may pass a wider type.
int64_t integer_of(const PluginField& field) {
    if (field.type == PluginFieldType::kINT32) {
        return *static_cast<const int32_t*>(field.data);
    }
    if (field.type != PluginFieldType::kINT64) {
        refuse(std::string(field.name) + " must be an integer");
    }
    return *static_cast<const int64_t*>(field.data);
}

double real_of(const PluginField& field) {
    if (field.type == PluginFieldType::kFLOAT32) {
        return *static_cast<const float*>(field.data);
    }
    if (field.type != PluginFieldType::kFLOAT64) {
        refuse(std::string(field.name) + " must be a float");
    }
    return *static_cast<const double*>(field.data);
}

// Reads an attribute into the place of `slot`.
void read(const PluginField& field, const PluginField& slot) {
    if (field.data == nullptr || field.length != 1) {
        refuse(std::string(field.name) + " must have one value");
    }
    void* const place = const_cast<void*>(slot.data);
    if (slot.type == PluginFieldType::kFLOAT32) {
        *static_cast<float*>(place) = static_cast<float>(real_of(field));
        return;
    }
    const int64_t value = integer_of(field);
    if (slot.type == PluginFieldType::kINT64) {
        *static_cast<int64_t*>(place) = value;
        return;
    }
    if (value != static_cast<int32_t>(value)) {
        refuse(std::string(field.name) + " is out of range");
    }
    *static_cast<int32_t*>(place) = static_cast<int32_t>(value);
}

AttentionAttributes parse(const PluginFieldCollection* given, TensorRTPhase phase) {
    if (given == nullptr || (given->nbFields > 0 && given->fields == nullptr)) {
        refuse("no attributes given");
    }
    AttentionAttributes a;
    std::vector<PluginField> missing = fields_of(a), stored{missing.back()};
    missing.pop_back();
    for (int32_t i = 0; i < given->nbFields; ++i) {
        const std::string name = given->fields[i].name == nullptr ? "" : given->fields[i].name;
        std::vector<PluginField>& slots = name == stored[0].name && phase == TensorRTPhase::kRUNTIME ? stored : missing;
        const auto slot =
            std::find_if(slots.begin(), slots.end(), [&](const PluginField& s) { return name == s.name; });
        if (slot == slots.end()) {
            refuse("unknown attribute '" + name + "'");
        }
        read(given->fields[i], *slot);
        if (&slots == &missing) {
            missing.erase(slot);
        }
    }
    if (!missing.empty()) {
        refuse(std::string("attribute ") + missing[0].name + " is missing");
    }
    if (a.num_kv_heads < 1 || a.num_q_heads < a.num_kv_heads || a.num_q_heads % a.num_kv_heads != 0) {
        refuse("num_q_heads must be a multiple of num_kv_heads, found " + std::to_string(a.num_q_heads) + " and " +
               std::to_string(a.num_kv_heads));
    }
    if (a.head_dim != 64 && a.head_dim != 128) {
        refuse("head_dim must be 64 or 128, found " + std::to_string(a.head_dim));
    }
    if (a.max_tree < 1) {
        refuse("max_tree must be positive, found " + std::to_string(a.max_tree));
    }
    if (!(a.scale > 0.0f && a.scale < 1e6f)) {
        refuse("scale must be positive and finite, found " + std::to_string(a.scale));
    }
    if (a.mask_mode < 0 || a.mask_mode > 2) {
        refuse("mask_mode must be 0 (tree), 1 (causal) or 2 (none), found " + std::to_string(a.mask_mode));
    }
    if (a.workspace_bytes < AttentionAttributes::kUnknown) {
        refuse("workspace_bytes must not be negative, found " + std::to_string(a.workspace_bytes));
    }
    return a;
}

}  // namespace

AttentionPlugin::AttentionPlugin(const PluginFieldCollection* fields, TensorRTPhase phase)
    : Plugin(kName, phase,
             {{4, false}, {4, false}, {4, false}, {4, false}, {4, false}, {1, true}, {1, true}, {3, true}},
             {kQ, kPastK, kPastV}),
      attributes_(parse(fields, phase)),
      fields_(fields_of(attributes_)),
      collection_{static_cast<int32_t>(fields_.size()), fields_.data()} {
    const auto& a = attributes_;
    timing_cache_id_ = std::string(kName) + "-" + kVersion + "-q" + std::to_string(a.num_q_heads) + "-kv" +
                       std::to_string(a.num_kv_heads) + "-d" + std::to_string(a.head_dim) + "-t" +
                       std::to_string(a.max_tree) + "-m" + std::to_string(a.mask_mode);
}

AttentionPlugin::AttentionPlugin(const AttentionPlugin& other)
    : Plugin(other),
      attributes_(other.attributes_),
      fields_(fields_of(attributes_)),
      collection_{static_cast<int32_t>(fields_.size()), fields_.data()},
      timing_cache_id_(other.timing_cache_id_) {}

std::vector<PluginField> AttentionPlugin::node_fields() {
    std::vector<PluginField> fields = fields_of({});
    fields.pop_back();
    for (PluginField& field : fields) {
        field.data = nullptr;
    }
    return fields;
}

IPluginV3* AttentionPlugin::clone() noexcept {
    return made(kName, [&] { return new AttentionPlugin(*this); });
}

void AttentionPlugin::check_extents(const Dims* dims) const {
    const auto& a = attributes_;
    const int64_t n = dims[kQ].d[0];
    const int64_t t = dims[kQ].d[1];
    const int64_t slots = dims[kPastK].d[0];
    const int64_t capacity = dims[kPastK].d[2];
    check(dims, {{kQ, 2, a.num_q_heads, "num_q_heads"},
                 {kQ, 3, a.head_dim, "head_dim"},
                 {kK, 0, n, "N of q"},
                 {kK, 1, t, "T of q"},
                 {kK, 2, a.num_kv_heads, "num_kv_heads"},
                 {kK, 3, a.head_dim, "head_dim"},
                 {kV, 0, n, "N of q"},
                 {kV, 1, t, "T of q"},
                 {kV, 2, a.num_kv_heads, "num_kv_heads"},
                 {kV, 3, a.head_dim, "head_dim"},
                 {kPastK, 1, a.num_kv_heads, "num_kv_heads"},
                 {kPastK, 3, a.head_dim, "head_dim"},
                 {kPastV, 0, slots, "slots of past_k"},
                 {kPastV, 1, a.num_kv_heads, "num_kv_heads"},
                 {kPastV, 2, capacity, "S of past_k"},
                 {kPastV, 3, a.head_dim, "head_dim"},
                 {kSlotIds, 0, n, "N of q"},
                 {kPastLen, 0, n, "N of q"},
                 {kTreeMask, 0, n, "N of q"}});
    if (n >= 0 && slots >= 0 && n > slots) {
        refuse("N = " + std::to_string(n) + " sequences need a cache slot each, found " + std::to_string(slots));
    }
    if (t > a.max_tree) {
        refuse("T = " + std::to_string(t) + " is above max_tree = " + std::to_string(a.max_tree));
    }
    if (capacity >= 0 && t > capacity) {
        refuse("T = " + std::to_string(t) + " new tokens do not fit a cache of " + std::to_string(capacity) + " rows");
    }
    if (a.mask_mode == static_cast<int32_t>(MaskMode::tree)) {
        check(dims, {{kTreeMask, 1, t, "T of q"}});
        const int64_t words = dims[kTreeMask].d[2];
        const int64_t needed = (static_cast<int64_t>(a.max_tree) + 31) / 32;
        if (words >= 0 && words < needed) {
            refuse("tree_mask has " + std::to_string(words) + " words, max_tree = " + std::to_string(a.max_tree) +
                   " needs " + std::to_string(needed));
        }
    }
}

void AttentionPlugin::prepare(const Dims* dims, DataType type, TensorRTPhase phase) {
    // At run time the plan has stored it, unless it is one of before.
    if (phase == TensorRTPhase::kBUILD || attributes_.workspace_bytes == AttentionAttributes::kUnknown) {
        attributes_.workspace_bytes = static_cast<int64_t>(workspace_bound(dims, type));
    }
}

TreeAttention AttentionPlugin::shaped(const Dims* dims, DataType type) const {
    TreeAttention call{};
    call.sequences = extent(dims[kQ], 0);
    call.tokens = extent(dims[kQ], 1);
    call.q_heads = attributes_.num_q_heads;
    call.kv_heads = attributes_.num_kv_heads;
    call.head_dim = attributes_.head_dim;
    call.slots = extent(dims[kPastK], 0);
    call.capacity = extent(dims[kPastK], 2);
    call.mask_words = extent(dims[kTreeMask], 2);
    call.type = type == DataType::kBF16 ? ElementType::bf16 : ElementType::fp16;
    call.mask_mode = static_cast<MaskMode>(attributes_.mask_mode);
    call.scale = attributes_.scale;
    return call;
}

size_t AttentionPlugin::workspace_bound(const Dims* dims, DataType type) const {
    TreeAttention call = shaped(dims, type);
    call.sequences = call.slots;
    call.tokens = std::min(attributes_.max_tree, call.capacity);
    return attention_workspace_bound(call);
}

size_t AttentionPlugin::getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                         const DynamicPluginTensorDesc*, int32_t) const noexcept {
    if (input_count != kInputs) {
        return 0;
    }
    const InputDims dims = dims_of(inputs, [](const auto& d) { return d.max; });
    return workspace_bound(dims.data(), inputs[kQ].desc.type);
}

int32_t AttentionPlugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc*,
                                 const void* const* inputs, void* const* outputs, void* workspace,
                                 cudaStream_t stream) noexcept {
    const InputDims dims = dims_of(input_descs, [](const auto& d) { return d.dims; });
    TreeAttention call = shaped(dims.data(), input_descs[kQ].type);
    if (call.sequences == 0 || call.tokens == 0) {
        return 0;
    }
    if (!in_place(inputs, outputs, kPresentK)) {
        return failure(kName, "present_k and present_v must be bound to the addresses of past_k and past_v");
    }
    call.q = inputs[kQ];
    call.k = inputs[kK];
    call.v = inputs[kV];
    call.past_k = inputs[kPastK];
    call.past_v = inputs[kPastV];
    call.present_k = outputs[kPresentK];
    call.present_v = outputs[kPresentV];
    call.slot_ids = static_cast<const int32_t*>(inputs[kSlotIds]);
    call.past_len = static_cast<const int32_t*>(inputs[kPastLen]);
    call.tree_mask = static_cast<const int32_t*>(inputs[kTreeMask]);
    call.out = outputs[kAttn];
    call.workspace = workspace;
    // What getWorkspaceSize asked for when the plan was built, and TensorRT gave: the launcher refuses a call that
    // needs more.
    call.workspace_bytes = static_cast<size_t>(std::max<int64_t>(attributes_.workspace_bytes, 0));
    return launched(tree_attention(call, stream));
}

}  // namespace ddtree::trt
