// DDTreeKVCompact: glue between TensorRT and the cache compaction of ddtree/round.h.
//
// P planes (a key or a value cache of one layer), N sequences, K kept rows, Hkv heads, D head size, S capacity of a
// slot. The positions are those of ddtree_trt/plugins/__init__.py; there are no attributes.
#pragma once

#include "ddtree/round.h"
#include "plugin.h"

namespace ddtree::trt {

class CompactPlugin final : public Plugin {
public:
    static constexpr char kName[] = "DDTreeKVCompact";
    enum Input { kPastCache, kSlotIds, kPastLen, kKeep, kInputs };
    enum Output { kPresentCache, kOutputs };

    // Throws where there are attributes.
    CompactPlugin(const PluginFieldCollection* fields, TensorRTPhase phase);
    static std::vector<PluginField> node_fields() { return {}; }

    IPluginV3* clone() noexcept override;
    const char* getTimingCacheID() noexcept override { return "DDTreeKVCompact-1"; }
    int32_t enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs,
                    const void* const* inputs, void* const* outputs, void* workspace,
                    cudaStream_t stream) noexcept override;
    const PluginFieldCollection* getFieldsToSerialize() noexcept override { return &kNoFields; }

private:
    static constexpr PluginFieldCollection kNoFields{0, nullptr};

    void check_extents(const Dims* dims) const override;
};

}  // namespace ddtree::trt
