#include "attention_plugin.h"

#include <algorithm>
#include <array>
#include <exception>
#include <string>

namespace ddtree::trt {

namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

// The dimensions of the inputs, from either kind of TensorRT's descriptions.
using InputDims = std::array<Dims, AttentionPlugin::kInputs>;

template <typename Desc, typename Of>
InputDims dims_of(const Desc* inputs, Of of) {
    InputDims dims;
    for (size_t i = 0; i < dims.size(); ++i) {
        dims[i] = of(inputs[i]);
    }
    return dims;
}

}  // namespace

AttentionPlugin::AttentionPlugin(const AttentionAttributes& attributes, TensorRTPhase phase)
    : attributes_(attributes), phase_(phase) {
    const auto& a = attributes_;
    timing_cache_id_ = std::string(kName) + "-" + kVersion + "-q" + std::to_string(a.num_q_heads) + "-kv" +
                       std::to_string(a.num_kv_heads) + "-d" + std::to_string(a.head_dim) + "-t" +
                       std::to_string(a.max_tree) + "-m" + std::to_string(a.mask_mode);
    describe_fields();
}

AttentionPlugin::AttentionPlugin(const AttentionPlugin& other) : AttentionPlugin(other.attributes_, other.phase_) {}

void AttentionPlugin::describe_fields() {
    fields_ = {PluginField("num_q_heads", &attributes_.num_q_heads, PluginFieldType::kINT32, 1),
               PluginField("num_kv_heads", &attributes_.num_kv_heads, PluginFieldType::kINT32, 1),
               PluginField("head_dim", &attributes_.head_dim, PluginFieldType::kINT32, 1),
               PluginField("max_tree", &attributes_.max_tree, PluginFieldType::kINT32, 1),
               PluginField("scale", &attributes_.scale, PluginFieldType::kFLOAT32, 1),
               PluginField("mask_mode", &attributes_.mask_mode, PluginFieldType::kINT32, 1),
               PluginField("workspace_bytes", &attributes_.workspace_bytes, PluginFieldType::kINT64, 1)};
    collection_.nbFields = static_cast<int32_t>(fields_.size());
    collection_.fields = fields_.data();
}

nvinfer1::IPluginV3* AttentionPlugin::clone() noexcept {
    try {
        return new AttentionPlugin(*this);
    } catch (const std::exception& error) {
        failure(kName, error.what());
        return nullptr;
    }
}

int32_t AttentionPlugin::getOutputDataTypes(DataType* outputs, int32_t output_count, const DataType* inputs,
                                            int32_t input_count) const noexcept {
    if (input_count != kInputs || output_count != kOutputs) {
        return failure(kName, "takes 8 inputs and gives 3 outputs");
    }
    outputs[kAttn] = inputs[kQ];
    outputs[kPresentK] = inputs[kPastK];
    outputs[kPresentV] = inputs[kPastV];
    return 0;
}

int32_t AttentionPlugin::getOutputShapes(const DimsExprs* inputs, int32_t input_count, const DimsExprs*,
                                         int32_t shape_input_count, DimsExprs* outputs, int32_t output_count,
                                         nvinfer1::IExprBuilder&) noexcept {
    if (input_count != kInputs || shape_input_count != 0 || output_count != kOutputs) {
        return failure(kName, "takes 8 inputs, no shape inputs, and gives 3 outputs");
    }
    outputs[kAttn] = inputs[kQ];
    outputs[kPresentK] = inputs[kPastK];
    outputs[kPresentV] = inputs[kPastV];
    return 0;
}

bool AttentionPlugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors,
                                                int32_t input_count, int32_t output_count) noexcept {
    if (input_count != kInputs || output_count != kOutputs || position < 0 || position >= kInputs + kOutputs ||
        !is_linear(tensors[position].desc)) {
        return false;
    }
    const DataType type = tensors[position].desc.type;
    if (position == kSlotIds || position == kPastLen || position == kTreeMask) {
        return type == DataType::kINT32;
    }
    return position == kQ ? is_half(type) : type == tensors[kQ].desc.type;
}

std::string AttentionPlugin::fault(const Dims* dims) const {
    constexpr int32_t kRanks[kInputs] = {4, 4, 4, 4, 4, 1, 1, 3};
    for (int32_t i = 0; i < kInputs; ++i) {
        if (dims[i].nbDims != kRanks[i]) {
            return "input " + std::to_string(i) + " must have " + std::to_string(kRanks[i]) + " dimensions, found " +
                   std::to_string(dims[i].nbDims);
        }
    }
    const auto& a = attributes_;
    struct Rule {
        Input input;
        int32_t dimension;
        int64_t expected;
        const char* meaning;
    };
    const int64_t n = dims[kQ].d[0];
    const int64_t t = dims[kQ].d[1];
    const int64_t slots = dims[kPastK].d[0];
    const int64_t capacity = dims[kPastK].d[2];
    const Rule rules[] = {
        {kQ, 2, a.num_q_heads, "num_q_heads"},
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
        {kTreeMask, 0, n, "N of q"},
    };
    for (const Rule& rule : rules) {
        const int64_t found = dims[rule.input].d[rule.dimension];
        if (found >= 0 && rule.expected >= 0 && found != rule.expected) {
            return "dimension " + std::to_string(rule.dimension) + " of input " + std::to_string(rule.input) +
                   " must be " + rule.meaning + " = " + std::to_string(rule.expected) + ", found " +
                   std::to_string(found);
        }
    }
    if (n >= 0 && slots >= 0 && n > slots) {
        return "N = " + std::to_string(n) + " sequences need a cache slot each, found " + std::to_string(slots);
    }
    if (t > a.max_tree) {
        return "T = " + std::to_string(t) + " is above max_tree = " + std::to_string(a.max_tree);
    }
    if (capacity >= 0 && t > capacity) {
        return "T = " + std::to_string(t) + " new tokens do not fit a cache of " + std::to_string(capacity) + " rows";
    }
    if (a.mask_mode == static_cast<int32_t>(MaskMode::tree)) {
        const int64_t words = dims[kTreeMask].d[2];
        const int64_t rows = dims[kTreeMask].d[1];
        if (rows >= 0 && t >= 0 && rows != t) {
            return "tree_mask has " + std::to_string(rows) + " rows for T = " + std::to_string(t);
        }
        if (words >= 0 && words < (static_cast<int64_t>(a.max_tree) + 31) / 32) {
            return "tree_mask has " + std::to_string(words) + " words, max_tree = " + std::to_string(a.max_tree) +
                   " needs " + std::to_string((static_cast<int64_t>(a.max_tree) + 31) / 32);
        }
    }
    return {};
}

int32_t AttentionPlugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                         const DynamicPluginTensorDesc*, int32_t output_count) noexcept {
    try {
        if (input_count != kInputs || output_count != kOutputs) {
            return failure(kName, "takes 8 inputs and gives 3 outputs");
        }
        const InputDims most = dims_of(inputs, [](const auto& d) { return d.max; });
        for (const InputDims& dims : {dims_of(inputs, [](const auto& d) { return d.desc.dims; }), most}) {
            const std::string wrong = fault(dims.data());
            if (!wrong.empty()) {
                return failure(kName, wrong);
            }
        }
        attributes_.workspace_bytes = static_cast<int64_t>(workspace_bound(most.data(), inputs[kQ].desc.type));
        return 0;
    } catch (const std::exception& error) {
        return failure(kName, error.what());
    }
}

int32_t AttentionPlugin::onShapeChange(const PluginTensorDesc* inputs, int32_t input_count, const PluginTensorDesc*,
                                       int32_t output_count) noexcept {
    try {
        if (input_count != kInputs || output_count != kOutputs) {
            return failure(kName, "takes 8 inputs and gives 3 outputs");
        }
        const InputDims dims = dims_of(inputs, [](const auto& d) { return d.dims; });
        const std::string wrong = fault(dims.data());
        if (!wrong.empty()) {
            return failure(kName, wrong);
        }
        if (attributes_.workspace_bytes == AttentionAttributes::kUnknown) {  // a plan that was stored without it
            attributes_.workspace_bytes = static_cast<int64_t>(workspace_bound(dims.data(), inputs[kQ].type));
        }
        return 0;
    } catch (const std::exception& error) {
        return failure(kName, error.what());
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
    // The builder times a plugin on separate buffers; a runtime that binds two would lose the past.
    if (phase_ == TensorRTPhase::kRUNTIME &&
        (outputs[kPresentK] != inputs[kPastK] || outputs[kPresentV] != inputs[kPastV])) {
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
    const Status status = tree_attention(call, stream);
    return status == Status::ok ? 0 : failure(kName, text(status));
}

}  // namespace ddtree::trt
