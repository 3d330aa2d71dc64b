// What the plugins share: one object with the three capabilities and a fixed identity, everything that follows from a
// list of its tensors, and their creator.
#pragma once

#include <NvInferRuntime.h>

#include <array>
#include <exception>
#include <initializer_list>
#include <string>
#include <vector>

#include "ddtree/launch.h"

namespace ddtree::trt {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IPluginV3;
using nvinfer1::PluginCapabilityType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorRTPhase;

inline constexpr char kVersion[] = "1";
inline constexpr char kNamespace[] = "ddtree";
inline constexpr int32_t kMostInputs = 8;

// The logger that TensorRT passes to the library; without effect until then.
void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;
// Logs `message` under the plugin's name and returns the status TensorRT takes for failure.
int32_t failure(const char* plugin, const std::string& message) noexcept;
[[noreturn]] void refuse(const std::string& message);  // throws what `failure` logs

inline int32_t extent(const Dims& dims, int32_t i) { return static_cast<int32_t>(dims.d[i]); }

// A new plugin that `make` returns; null where it throws.
template <typename Make>
IPluginV3* made(const char* plugin, Make make) noexcept {
    try {
        return make();
    } catch (const std::exception& error) {
        failure(plugin, error.what());
        return nullptr;
    }
}

struct Input {
    int32_t rank;
    bool control;  // int32; the others are bf16 or fp16, all of one type
};

// A dimension of an input that must have an extent; those of -1, on either side, are not yet known.
struct Rule {
    int32_t input;
    int32_t dimension;
    int64_t expected;
    const char* meaning;
};
void check(const Dims* dims, std::initializer_list<Rule> rules);

using InputDims = std::array<Dims, kMostInputs>;

// Input 0 is not control data; every output has type and shape of an input.
class Plugin : public IPluginV3,
               public nvinfer1::v_1_0::IPluginV3OneCore,
               public nvinfer1::v_1_0::IPluginV3OneBuild,
               public nvinfer1::v_1_0::IPluginV3OneRuntime {
public:
    nvinfer1::IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept final;
    const char* getPluginName() const noexcept final { return name_; }
    const char* getPluginVersion() const noexcept final { return kVersion; }
    const char* getPluginNamespace() const noexcept final { return kNamespace; }
    // A context has no state of its own, so that the object serves as its clone.
    IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept final { return clone(); }

    int32_t getNbOutputs() const noexcept final { return static_cast<int32_t>(outputs_.size()); }
    int32_t getOutputDataTypes(DataType* outputs, int32_t output_count, const DataType* inputs,
                               int32_t input_count) const noexcept final;
    int32_t getOutputShapes(const DimsExprs* inputs, int32_t input_count, const DimsExprs* shape_inputs,
                            int32_t shape_input_count, DimsExprs* outputs, int32_t output_count,
                            nvinfer1::IExprBuilder& builder) noexcept final;
    bool supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors, int32_t input_count,
                                   int32_t output_count) noexcept final;
    int32_t configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                            const DynamicPluginTensorDesc* outputs, int32_t output_count) noexcept final;
    int32_t onShapeChange(const PluginTensorDesc* inputs, int32_t input_count, const PluginTensorDesc* outputs,
                          int32_t output_count) noexcept final;

protected:
    // `outputs`: of each output the input that it is like.
    Plugin(const char* name, TensorRTPhase phase, std::vector<Input> inputs, std::vector<int32_t> outputs)
        : phase_(phase), name_(name), inputs_(std::move(inputs)), outputs_(std::move(outputs)) {}
    Plugin(const Plugin&) = default;

    // Throws where extents contradict each other or the attributes.
    virtual void check_extents(const Dims* dims) const = 0;
    // Before the first call: the extents of a profile's largest call when it is built, else those of the next call.
    virtual void prepare(const Dims*, DataType, TensorRTPhase) {}

    bool fits(int32_t input_count, int32_t output_count) const noexcept {
        return input_count == static_cast<int32_t>(inputs_.size()) && output_count == getNbOutputs();
    }
    // Whether a call may run on these buffers. The builder times a plugin on separate ones; a runtime that binds two
    // for an output from `first` on would lose the cache's rows.
    bool in_place(const void* const* inputs, void* const* outputs, int32_t first) const noexcept;
    int32_t launched(Status status) const noexcept;

    template <typename Desc, typename Of>
    InputDims dims_of(const Desc* inputs, Of of) const {
        InputDims dims{};
        for (size_t i = 0; i < inputs_.size(); ++i) {
            dims[i] = of(inputs[i]);
        }
        return dims;
    }

    TensorRTPhase phase_;

private:
    int32_t wrong_arity() const noexcept;
    void check_all(const Dims* dims) const;

    const char* name_;
    std::vector<Input> inputs_;
    std::vector<int32_t> outputs_;
};

// Makes a plugin from the attributes of a graph's node, or from those stored in a plan.
template <typename P>
class Creator final : public nvinfer1::v_1_0::IPluginCreatorV3One {
public:
    IPluginV3* createPlugin(const char*, const PluginFieldCollection* fields, TensorRTPhase phase) noexcept override {
        return made(P::kName, [&] { return new P(fields, phase); });
    }
    const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
    const char* getPluginName() const noexcept override { return P::kName; }
    const char* getPluginVersion() const noexcept override { return kVersion; }
    const char* getPluginNamespace() const noexcept override { return kNamespace; }

private:
    std::vector<PluginField> fields_ = P::node_fields();
    PluginFieldCollection collection_{static_cast<int32_t>(fields_.size()), fields_.data()};
};

}  // namespace ddtree::trt
