// Makes DDTreeAttention from the attributes of a graph's node, or from those stored in a plan.
#pragma once

#include <vector>

#include "attention_plugin.h"

namespace ddtree::trt {

class AttentionCreator final : public nvinfer1::v_1_0::IPluginCreatorV3One {
public:
    AttentionCreator();
    nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                      TensorRTPhase phase) noexcept override;
    const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
    const char* getPluginName() const noexcept override { return AttentionPlugin::kName; }
    const char* getPluginVersion() const noexcept override { return kVersion; }
    const char* getPluginNamespace() const noexcept override { return kNamespace; }

private:
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace ddtree::trt
