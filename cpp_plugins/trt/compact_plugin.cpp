#include "compact_plugin.h"

namespace ddtree::trt {

namespace {

constexpr int32_t kElementBytes = 2;  // of the two types there are

}  // namespace

CompactPlugin::CompactPlugin(const PluginFieldCollection* fields, TensorRTPhase phase)
    : Plugin(kName, phase, {{5, false}, {1, true}, {1, true}, {2, true}}, {kPastCache}) {
    if (fields != nullptr && fields->nbFields > 0) {
        refuse("takes no attributes");
    }
}

IPluginV3* CompactPlugin::clone() noexcept {
    return made(kName, [&] { return new CompactPlugin(*this); });
}

void CompactPlugin::check_extents(const Dims* dims) const {
    const Dims& cache = dims[kPastCache];
    const int64_t n = dims[kSlotIds].d[0];
    check(dims, {{kPastLen, 0, n, "N of slot_ids"}, {kKeep, 0, n, "N of slot_ids"}});
    if (n >= 0 && cache.d[1] >= 0 && n > cache.d[1]) {
        refuse("N = " + std::to_string(n) + " sequences need a cache slot each, found " + std::to_string(cache.d[1]));
    }
    if (cache.d[4] >= 0 && cache.d[4] * kElementBytes % 16 != 0) {
        refuse("a row of the cache must be a multiple of 16 bytes, found " +
               std::to_string(cache.d[4] * kElementBytes));
    }
}

int32_t CompactPlugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc*, const void* const* inputs,
                               void* const* outputs, void*, cudaStream_t stream) noexcept {
    if (!in_place(inputs, outputs, kPresentCache)) {
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
    return launched(device_compact(call, stream));
}

}  // namespace ddtree::trt
