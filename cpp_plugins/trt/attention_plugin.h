// DDTreeAttention: glue between TensorRT and ddtree/attention.h.
//
// N sequences, T tokens, Hq/Hkv heads, D head size, S capacity of a slot, W mask words. The positions and attributes
// are those of ddtree_trt/plugins/__init__.py.
#pragma once

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

    // Throws for attributes that are missing, unknown or impossible.
    AttentionPlugin(const PluginFieldCollection* fields, TensorRTPhase phase);
    AttentionPlugin(const AttentionPlugin& other);
    static std::vector<PluginField> node_fields();

    IPluginV3* clone() noexcept override;
    size_t getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                            const DynamicPluginTensorDesc* outputs, int32_t output_count) const noexcept override;
    const char* getTimingCacheID() noexcept override { return timing_cache_id_.c_str(); }
    int32_t enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs,
                    const void* const* inputs, void* const* outputs, void* workspace,
                    cudaStream_t stream) noexcept override;
    const PluginFieldCollection* getFieldsToSerialize() noexcept override { return &collection_; }

private:
    void check_extents(const Dims* dims) const override;
    void prepare(const Dims* dims, DataType type, TensorRTPhase phase) override;
    // The extents of a call, without its pointers.
    TreeAttention shaped(const Dims* dims, DataType type) const;
    // Bytes of scratch for the largest possible call, from what is equal in every profile: each of N sequences has a
    // slot of its own, and T is at most max_tree. So every profile reserves the same number of bytes.
    size_t workspace_bound(const Dims* dims, DataType type) const;

    AttentionAttributes attributes_;
    std::vector<PluginField> fields_;  // point into attributes_
    PluginFieldCollection collection_;
    std::string timing_cache_id_;
};

}  // namespace ddtree::trt
