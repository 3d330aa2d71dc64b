#include "plugin.h"

#include <atomic>
#include <stdexcept>

namespace ddtree::trt {

namespace {

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

const char* text(Status status) noexcept {
    switch (status) {
        case Status::ok:
            return "ok";
        case Status::null_pointer:
            return "a tensor has no address";
        case Status::bad_shape:
            return "impossible extents";
        case Status::unsupported:
            return "no kernel for this head size, type or mask mode";
        case Status::misaligned:
            return "a tensor's address is not a multiple of 16 bytes";
        case Status::workspace_too_small:
            return "the workspace is too small";
        case Status::launch_failed:
            return "CUDA refused the launch";
    }
    return "unknown status";
}

}  // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept { logger_finder.store(finder); }

int32_t failure(const char* plugin, const std::string& message) noexcept {
    try {
        nvinfer1::ILoggerFinder* finder = logger_finder.load();
        nvinfer1::ILogger* logger = finder == nullptr ? nullptr : finder->findLogger();
        if (logger != nullptr) {
            logger->log(nvinfer1::ILogger::Severity::kERROR, (std::string(plugin) + ": " + message).c_str());
        }
    } catch (const std::exception&) {
        // No memory for a message: the status still reports the failure.
    }
    return -1;
}

void refuse(const std::string& message) { throw std::invalid_argument(message); }

void check(const Dims* dims, std::initializer_list<Rule> rules) {
    for (const Rule& rule : rules) {
        const int64_t found = dims[rule.input].d[rule.dimension];
        if (found >= 0 && rule.expected >= 0 && found != rule.expected) {
            refuse("dimension " + std::to_string(rule.dimension) + " of input " + std::to_string(rule.input) +
                   " must be " + rule.meaning + " = " + std::to_string(rule.expected) + ", found " +
                   std::to_string(found));
        }
    }
}

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(PluginCapabilityType type) noexcept {
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

int32_t Plugin::getOutputDataTypes(DataType* outputs, int32_t output_count, const DataType* inputs,
                                   int32_t input_count) const noexcept {
    if (!fits(input_count, output_count)) {
        return wrong_arity();
    }
    for (int32_t i = 0; i < output_count; ++i) {
        outputs[i] = inputs[outputs_[i]];
    }
    return 0;
}

int32_t Plugin::getOutputShapes(const DimsExprs* inputs, int32_t input_count, const DimsExprs*,
                                int32_t shape_input_count, DimsExprs* outputs, int32_t output_count,
                                nvinfer1::IExprBuilder&) noexcept {
    if (!fits(input_count, output_count) || shape_input_count != 0) {
        return wrong_arity();
    }
    for (int32_t i = 0; i < output_count; ++i) {
        outputs[i] = inputs[outputs_[i]];
    }
    return 0;
}

bool Plugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors, int32_t input_count,
                                       int32_t output_count) noexcept {
    if (!fits(input_count, output_count) || position < 0 || position >= input_count + output_count ||
        tensors[position].desc.format != nvinfer1::TensorFormat::kLINEAR) {
        return false;
    }
    const DataType type = tensors[position].desc.type;
    if (position == 0) {
        return type == DataType::kHALF || type == DataType::kBF16;
    }
    const bool control = position < input_count && inputs_[position].control;
    return type == (control ? DataType::kINT32 : tensors[0].desc.type);
}

int32_t Plugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                const DynamicPluginTensorDesc*, int32_t output_count) noexcept {
    if (!fits(input_count, output_count)) {
        return wrong_arity();
    }
    try {
        const InputDims most = dims_of(inputs, [](const auto& d) { return d.max; });
        check_all(dims_of(inputs, [](const auto& d) { return d.desc.dims; }).data());
        check_all(most.data());
        prepare(most.data(), inputs[0].desc.type, TensorRTPhase::kBUILD);
        return 0;
    } catch (const std::exception& error) {
        return failure(name_, error.what());
    }
}

int32_t Plugin::onShapeChange(const PluginTensorDesc* inputs, int32_t input_count, const PluginTensorDesc*,
                              int32_t output_count) noexcept {
    if (!fits(input_count, output_count)) {
        return wrong_arity();
    }
    try {
        const InputDims dims = dims_of(inputs, [](const auto& d) { return d.dims; });
        check_all(dims.data());
        prepare(dims.data(), inputs[0].type, TensorRTPhase::kRUNTIME);
        return 0;
    } catch (const std::exception& error) {
        return failure(name_, error.what());
    }
}

bool Plugin::in_place(const void* const* inputs, void* const* outputs, int32_t first) const noexcept {
    for (int32_t i = first; phase_ == TensorRTPhase::kRUNTIME && i < getNbOutputs(); ++i) {
        if (outputs[i] != inputs[outputs_[i]]) {
            return false;
        }
    }
    return true;
}

int32_t Plugin::launched(Status status) const noexcept {
    return status == Status::ok ? 0 : failure(name_, text(status));
}

int32_t Plugin::wrong_arity() const noexcept {
    return failure(name_, "was given another number of inputs, shape inputs or outputs than it has");
}

void Plugin::check_all(const Dims* dims) const {
    for (size_t i = 0; i < inputs_.size(); ++i) {
        if (dims[i].nbDims != inputs_[i].rank) {
            refuse("input " + std::to_string(i) + " must have " + std::to_string(inputs_[i].rank) +
                   " dimensions, found " + std::to_string(dims[i].nbDims));
        }
    }
    check_extents(dims);
}

}  // namespace ddtree::trt
