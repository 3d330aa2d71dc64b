// The two symbols TensorRT looks up in a plugin library. Their visibility is spelled out because TENSORRTAPI expands to
// nothing here, and creators are listed rather than registered because the registering macro loses a namespace.

#include "attention_plugin.h"
#include "compact_plugin.h"
#include "ddtree/abi.h"

namespace {

[[maybe_unused]] __attribute__((used)) const char kMarker[] = DDTREE_ABI_MARKER;

}  // namespace

#define DDTREE_EXPORT extern "C" __attribute__((visibility("default")))

DDTREE_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { ddtree::trt::set_logger_finder(finder); }

DDTREE_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    static ddtree::trt::Creator<ddtree::trt::AttentionPlugin> attention;
    static ddtree::trt::Creator<ddtree::trt::CompactPlugin> compact;
    static nvinfer1::IPluginCreatorInterface* const creators[] = {&attention, &compact};
    count = 2;
    return creators;
}
