// DDTreeAttention: glue between TensorRT and ddtree/attention.h.
//
// N sequences, T tokens, Hq/Hkv heads, D head size, S capacity of a slot, W mask words. The positions and attributes
// are those of ddtree_trt/plugins/__init__.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ddtree/attention.h"
#include "plugin.h"

namespace ddtree::trt {

struct AttentionAttributes {
    int32_t num_q_heads = 0;
    int32_t num_kv_heads = 0;
    int32_t head_dim = 0;
    int32_t max_tree = 0;  // largest T of any profile
    float scale = 0.0f;
    int32_t mask_mode = 0;
    // Bytes of scratch that the plan reserves for a call. Not an attribute of a node: it is stored in the plan when it
    // is built, so that a library which needs more finds that at run time. kUnknown until then.
    int64_t workspace_bytes = kUnknown;

    static constexpr int64_t kUnknown = -1;
};

class AttentionPlugin final : public Plugin {
public:
    static constexpr char kName[] = "DDTreeAttention";
    enum Input { kQ, kK, kV, kPastK, kPastV, kSlotIds, kPastLen, kTreeMask, kInputs };
    enum Output { kAttn, kPresentK, kPresentV, kOutputs };

    AttentionPlugin(const AttentionAttributes& attributes, TensorRTPhase phase);
    AttentionPlugin(const AttentionPlugin& other);

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
    size_t getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                            const DynamicPluginTensorDesc* outputs, int32_t output_count) const noexcept override;
    const char* getTimingCacheID() noexcept override { return timing_cache_id_.c_str(); }

    int32_t onShapeChange(const PluginTensorDesc* inputs, int32_t input_count, const PluginTensorDesc* outputs,
                          int32_t output_count) noexcept override;
    int32_t enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs,
                    const void* const* inputs, void* const* outputs, void* workspace,
                    cudaStream_t stream) noexcept override;
    const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override { return &collection_; }

private:
    // The message for extents that contradict each other or the attributes; empty when none do. Dimensions of -1 (not
    // yet known) are accepted.
    std::string fault(const Dims* dims) const;
    // The extents of a call, without its pointers.
    TreeAttention shaped(const Dims* dims, DataType type) const;
    // Bytes of scratch for the largest possible call, from what is equal in every profile: each of N sequences has a
    // slot of its own, and T is at most max_tree. So every profile reserves the same number of bytes.
    size_t workspace_bound(const Dims* dims, DataType type) const;
    void describe_fields();

    AttentionAttributes attributes_;
    TensorRTPhase phase_;
    std::string timing_cache_id_;
    std::vector<nvinfer1::PluginField> fields_;  // point into attributes_
    nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace ddtree::trt
