// The parts that the plugins share: one object with the three capabilities, a fixed identity, and
// helpers that read tensors.
#pragma once

#include <NvInferRuntime.h>

#include <atomic>
#include <string>

#include "ddtree/launch.h"

namespace ddtree::trt {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginCapabilityType;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorRTPhase;

inline constexpr char kVersion[] = "1";
inline constexpr char kNamespace[] = "ddtree";

// The logger that TensorRT passes to the library; without effect until then.
void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;
void log_error(const std::string& message) noexcept;
const char* text(Status status) noexcept;

inline bool is_half(DataType type) { return type == DataType::kHALF || type == DataType::kBF16; }
inline bool is_linear(const PluginTensorDesc& tensor) { return tensor.format == nvinfer1::TensorFormat::kLINEAR; }
inline int32_t extent(const Dims& dims, int32_t i) { return static_cast<int32_t>(dims.d[i]); }

class Plugin : public nvinfer1::IPluginV3,
               public nvinfer1::v_1_0::IPluginV3OneCore,
               public nvinfer1::v_1_0::IPluginV3OneBuild,
               public nvinfer1::v_1_0::IPluginV3OneRuntime {
public:
    nvinfer1::IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept final {
        switch (type) {
            case PluginCapabilityType::kCORE:
                return static_cast<IPluginV3OneCore*>(this);
            case PluginCapabilityType::kBUILD:
                return static_cast<IPluginV3OneBuild*>(this);
            case PluginCapabilityType::kRUNTIME:
                return static_cast<IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }
    const char* getPluginVersion() const noexcept final { return kVersion; }
    const char* getPluginNamespace() const noexcept final { return kNamespace; }
    // A context has no state of its own, so that the object serves as its clone.
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept final { return clone(); }

protected:
    Plugin() = default;
    Plugin(const Plugin&) = default;
};

// Logs `message` under the plugin's name and returns the status TensorRT takes for failure.
int32_t failure(const char* plugin, const std::string& message) noexcept;

}  // namespace ddtree::trt
