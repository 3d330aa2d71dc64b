// DDTreeKVCompact: glue between TensorRT and the cache compaction of ddtree/round.h, with its creator.
//
// P planes (a key or a value cache of one layer), N sequences, K kept rows, Hkv heads, D head size, S capacity of a
// slot. The positions are those of ddtree_trt/plugins/__init__.py; there are no attributes.
#pragma once

#include <cstdint>

#include "ddtree/round.h"
#include "plugin.h"

namespace ddtree::trt {

class CompactPlugin final : public Plugin {
public:
    static constexpr char kName[] = "DDTreeKVCompact";
    enum Input { kPastCache, kSlotIds, kPastLen, kKeep, kInputs };
    enum Output { kPresentCache, kOutputs };

    explicit CompactPlugin(TensorRTPhase phase) : phase_(phase) {}

    nvinfer1::IPluginV3* clone() noexcept override;
    const char* getPluginName() const noexcept override { return kName; }

    int32_t getNbOutputs() const noexcept override { return kOutputs; }
    int32_t getOutputDataTypes(DataType* outputs, int32_t output_count, const DataType* inputs,
                               int32_t input_count) const noexcept override;
    int32_t getOutputShapes(const DimsExprs* inputs, int32_t input_count, const DimsExprs* shape_inputs,
                            int32_t shape_input_count, DimsExprs* outputs, int32_t output_count,
                            nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors, int32_t input_count,
                                   int32_t output_count) noexcept override;
    int32_t configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                            const DynamicPluginTensorDesc* outputs, int32_t output_count) noexcept override;
    const char* getTimingCacheID() noexcept override { return "DDTreeKVCompact-1"; }

    int32_t onShapeChange(const PluginTensorDesc* inputs, int32_t input_count, const PluginTensorDesc* outputs,
                          int32_t output_count) noexcept override;
    int32_t enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs,
                    const void* const* inputs, void* const* outputs, void* workspace,
                    cudaStream_t stream) noexcept override;
    const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override { return &kNoFields; }

    static constexpr nvinfer1::PluginFieldCollection kNoFields{0, nullptr};

private:
    TensorRTPhase phase_;
};

class CompactCreator final : public nvinfer1::v_1_0::IPluginCreatorV3One {
public:
    nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                      TensorRTPhase phase) noexcept override;
    const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &CompactPlugin::kNoFields; }
    const char* getPluginName() const noexcept override { return CompactPlugin::kName; }
    const char* getPluginVersion() const noexcept override { return kVersion; }
    const char* getPluginNamespace() const noexcept override { return kNamespace; }
};

}  // namespace ddtree::trt
