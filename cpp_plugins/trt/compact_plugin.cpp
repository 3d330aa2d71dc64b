#include "compact_plugin.h"

#include <new>
#include <string>

#include "ddtree/round.h"

namespace ddtree::trt {

namespace {

constexpr int32_t kRanks[CompactPlugin::kInputs] = {5, 1, 1, 2, 1};
constexpr int32_t kElementBytes = 2;

// What is wrong with the extents, in words, or null; -1 (not yet known) is let through.
template <typename Of>
const char* fault(Of dims_of) {
    for (int32_t i = 0; i < CompactPlugin::kInputs; ++i) {
        if (dims_of(i).nbDims != kRanks[i]) {
            return "inputs must be cache [planes, slots, Hkv, S, D], slot_ids [N], past_len [N], keep [N, M], "
                   "keep_count [N]";
        }
    }
    const int64_t n = dims_of(CompactPlugin::kSlotIds).d[0];
    for (const int32_t i : {CompactPlugin::kPastLen, CompactPlugin::kKeep, CompactPlugin::kKeepCount}) {
        if (n >= 0 && dims_of(i).d[0] >= 0 && dims_of(i).d[0] != n) {
            return "slot_ids, past_len, keep and keep_count must have the same N";
        }
    }
    const int64_t width = dims_of(CompactPlugin::kCache).d[4];
    return width >= 0 && (width == 0 || width % 8 != 0) ? "D must be a multiple of 8" : nullptr;
}

}  // namespace

nvinfer1::IPluginV3* CompactPlugin::clone() noexcept { return new (std::nothrow) CompactPlugin(phase_); }

int32_t CompactPlugin::getOutputDataTypes(DataType* outputs, int32_t output_count, const DataType* inputs,
                                          int32_t input_count) const noexcept {
    if (input_count != kInputs || output_count != 1) {
        return failure(kName, "takes 5 inputs and gives 1 output");
    }
    outputs[0] = inputs[kCache];
    return 0;
}

int32_t CompactPlugin::getOutputShapes(const DimsExprs* inputs, int32_t input_count, const DimsExprs*,
                                       int32_t shape_input_count, DimsExprs* outputs, int32_t output_count,
                                       nvinfer1::IExprBuilder&) noexcept {
    if (input_count != kInputs || shape_input_count != 0 || output_count != 1) {
        return failure(kName, "takes 5 inputs, no shape inputs, and gives 1 output");
    }
    outputs[0] = inputs[kCache];
    return 0;
}

bool CompactPlugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors,
                                              int32_t input_count, int32_t output_count) noexcept {
    if (input_count != kInputs || output_count != 1 || position < 0 || position > kInputs ||
        !is_linear(tensors[position].desc)) {
        return false;
    }
    const DataType type = tensors[position].desc.type;
    if (position == kCache) {
        return is_half(type);
    }
    return type == (position == kInputs ? tensors[kCache].desc.type : DataType::kINT32);
}

int32_t CompactPlugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                       const DynamicPluginTensorDesc*, int32_t output_count) noexcept {
    if (input_count != kInputs || output_count != 1) {
        return failure(kName, "takes 5 inputs and gives 1 output");
    }
    const char* wrong = fault([&](int32_t i) -> const Dims& { return inputs[i].max; });
    return wrong == nullptr ? 0 : failure(kName, wrong);
}

int32_t CompactPlugin::onShapeChange(const PluginTensorDesc* inputs, int32_t input_count, const PluginTensorDesc*,
                                     int32_t output_count) noexcept {
    if (input_count != kInputs || output_count != 1) {
        return failure(kName, "takes 5 inputs and gives 1 output");
    }
    const char* wrong = fault([&](int32_t i) -> const Dims& { return inputs[i].dims; });
    return wrong == nullptr ? 0 : failure(kName, wrong);
}

int32_t CompactPlugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc*,
                               const void* const* inputs, void* const* outputs, void*, cudaStream_t stream) noexcept {
    if (phase_ == TensorRTPhase::kRUNTIME && outputs[0] != inputs[kCache]) {
        return failure(kName, "the output must be bound to the address of the cache");
    }
    const Dims& cache = input_descs[kCache].dims;
    KvCompact call{};
    call.cache = outputs[0];
    call.slot_ids = static_cast<const int32_t*>(inputs[kSlotIds]);
    call.past_len = static_cast<const int32_t*>(inputs[kPastLen]);
    call.keep = static_cast<const int32_t*>(inputs[kKeep]);
    call.keep_count = static_cast<const int32_t*>(inputs[kKeepCount]);
    call.sequences = extent(input_descs[kSlotIds].dims, 0);
    call.planes = extent(cache, 0);
    call.slots = extent(cache, 1);
    call.kv_heads = extent(cache, 2);
    call.capacity = extent(cache, 3);
    call.max_keep = extent(input_descs[kKeep].dims, 1);
    call.row_bytes = extent(cache, 4) * kElementBytes;
    const Status status = device_compact(call, stream);
    return status == Status::ok ? 0 : failure(kName, text(status));
}

nvinfer1::IPluginV3* CompactCreator::createPlugin(const char*, const nvinfer1::PluginFieldCollection* fields,
                                                  TensorRTPhase phase) noexcept {
    if (fields != nullptr && fields->nbFields != 0) {
        failure(CompactPlugin::kName, "has no attributes");
        return nullptr;
    }
    return new (std::nothrow) CompactPlugin(phase);
}

}  // namespace ddtree::trt
