#include "compact_plugin.h"

#include <exception>
#include <new>
#include <string>

namespace ddtree::trt {

namespace {

constexpr char kArity[] = "takes 4 inputs, no shape inputs, and gives 1 output";
constexpr int32_t kElementBytes = 2;  // of the two types there are

// The message for extents that contradict each other; empty when none do. Dimensions of -1 (not yet known) are
// accepted.
template <typename Of>
std::string fault(Of dims) {
    constexpr int32_t kRanks[CompactPlugin::kInputs] = {5, 1, 1, 2};
    for (int32_t i = 0; i < CompactPlugin::kInputs; ++i) {
        if (dims(i).nbDims != kRanks[i]) {
            return "input " + std::to_string(i) + " must have " + std::to_string(kRanks[i]) + " dimensions, found " +
                   std::to_string(dims(i).nbDims);
        }
    }
    const Dims& cache = dims(CompactPlugin::kPastCache);
    const int64_t n = dims(CompactPlugin::kSlotIds).d[0];
    for (const int32_t i : {CompactPlugin::kPastLen, CompactPlugin::kKeep}) {
        const int64_t found = dims(i).d[0];
        if (n >= 0 && found >= 0 && found != n) {
            return "dimension 0 of input " + std::to_string(i) + " must be N of slot_ids = " + std::to_string(n) +
                   ", found " + std::to_string(found);
        }
    }
    if (n >= 0 && cache.d[1] >= 0 && n > cache.d[1]) {
        return "N = " + std::to_string(n) + " sequences need a cache slot each, found " + std::to_string(cache.d[1]);
    }
    if (cache.d[4] >= 0 && cache.d[4] * kElementBytes % 16 != 0) {
        return "a row of the cache must be a multiple of 16 bytes, found " + std::to_string(cache.d[4] * kElementBytes);
    }
    return {};
}

template <typename Of>
int32_t checked(int32_t input_count, int32_t output_count, Of dims) noexcept {
    try {
        if (input_count != CompactPlugin::kInputs || output_count != CompactPlugin::kOutputs) {
            return failure(CompactPlugin::kName, kArity);
        }
        const std::string wrong = fault(dims);
        return wrong.empty() ? 0 : failure(CompactPlugin::kName, wrong);
    } catch (const std::exception& error) {
        return failure(CompactPlugin::kName, error.what());
    }
}

}  // namespace

nvinfer1::IPluginV3* CompactPlugin::clone() noexcept { return new (std::nothrow) CompactPlugin(*this); }

int32_t CompactPlugin::getOutputDataTypes(DataType* outputs, int32_t output_count, const DataType* inputs,
                                          int32_t input_count) const noexcept {
    if (input_count != kInputs || output_count != kOutputs) {
        return failure(kName, kArity);
    }
    outputs[kPresentCache] = inputs[kPastCache];
    return 0;
}

int32_t CompactPlugin::getOutputShapes(const DimsExprs* inputs, int32_t input_count, const DimsExprs*,
                                       int32_t shape_input_count, DimsExprs* outputs, int32_t output_count,
                                       nvinfer1::IExprBuilder&) noexcept {
    if (input_count != kInputs || shape_input_count != 0 || output_count != kOutputs) {
        return failure(kName, kArity);
    }
    outputs[kPresentCache] = inputs[kPastCache];
    return 0;
}

bool CompactPlugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors,
                                              int32_t input_count, int32_t output_count) noexcept {
    if (input_count != kInputs || output_count != kOutputs || position < 0 || position >= kInputs + kOutputs ||
        !is_linear(tensors[position].desc)) {
        return false;
    }
    const DataType type = tensors[position].desc.type;
    if (position == kPastCache) {
        return is_half(type);
    }
    return position == kInputs + kPresentCache ? type == tensors[kPastCache].desc.type : type == DataType::kINT32;
}

int32_t CompactPlugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                       const DynamicPluginTensorDesc*, int32_t output_count) noexcept {
    return checked(input_count, output_count, [&](int32_t i) -> const Dims& { return inputs[i].desc.dims; });
}

int32_t CompactPlugin::onShapeChange(const PluginTensorDesc* inputs, int32_t input_count, const PluginTensorDesc*,
                                     int32_t output_count) noexcept {
    return checked(input_count, output_count, [&](int32_t i) -> const Dims& { return inputs[i].dims; });
}

int32_t CompactPlugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc*, const void* const* inputs,
                               void* const* outputs, void*, cudaStream_t stream) noexcept {
    // The builder times a plugin on separate buffers, whose content is nobody's; a runtime that binds two would leave
    // the rows where they are.
    if (phase_ == TensorRTPhase::kRUNTIME && outputs[kPresentCache] != inputs[kPastCache]) {
        return failure(kName, "present_cache must be bound to the address of past_cache");
    }
    const Dims& cache = input_descs[kPastCache].dims;
    KvCompact call{};
    call.cache = outputs[kPresentCache];
    call.slot_ids = static_cast<const int32_t*>(inputs[kSlotIds]);
    call.past_len = static_cast<const int32_t*>(inputs[kPastLen]);
    call.keep = static_cast<const int32_t*>(inputs[kKeep]);
    call.sequences = extent(input_descs[kSlotIds].dims, 0);
    call.planes = extent(cache, 0);
    call.slots = extent(cache, 1);
    call.kv_heads = extent(cache, 2);
    call.capacity = extent(cache, 3);
    call.row_bytes = extent(cache, 4) * kElementBytes;
    call.max_keep = extent(input_descs[kKeep].dims, 1);
    const Status status = device_compact(call, stream);
    return status == Status::ok ? 0 : failure(kName, text(status));
}

nvinfer1::IPluginV3* CompactCreator::createPlugin(const char*, const nvinfer1::PluginFieldCollection* fields,
                                                  TensorRTPhase phase) noexcept {
    if (fields != nullptr && fields->nbFields > 0) {
        failure(CompactPlugin::kName, "takes no attributes");
        return nullptr;
    }
    return new (std::nothrow) CompactPlugin(phase);
}

}  // namespace ddtree::trt
