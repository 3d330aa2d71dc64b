// Helpers of the glue's tests: checks that count failures, a logger, and tensors made by hand.
#pragma once

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attention_plugin.h"
#include "compact_plugin.h"

using namespace ddtree::trt;
using nvinfer1::IPluginV3;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::TensorFormat;

namespace {

int checks = 0;
int failures = 0;

#define CHECK(condition)                                                          \
    do {                                                                          \
        ++checks;                                                                 \
        if (!(condition)) {                                                       \
            ++failures;                                                           \
            std::printf("%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
        }                                                                         \
    } while (false)

class Logger final : public nvinfer1::ILogger {
public:
    void log(Severity, const char* message) noexcept override { last = message; }
    std::string last;
} logger;

class Finder final : public nvinfer1::v_1_0::ILoggerFinder {
public:
    nvinfer1::ILogger* findLogger() override { return &logger; }
} finder;

constexpr DataType kTypes[] = {DataType::kFLOAT, DataType::kHALF,  DataType::kINT8, DataType::kINT32,
                               DataType::kBOOL,  DataType::kUINT8, DataType::kFP8,  DataType::kBF16,
                               DataType::kINT64, DataType::kINT4,  DataType::kFP4};
constexpr TensorFormat kFormats[] = {TensorFormat::kLINEAR,     TensorFormat::kCHW2,     TensorFormat::kHWC8,
                                     TensorFormat::kCHW4,       TensorFormat::kCHW16,    TensorFormat::kCHW32,
                                     TensorFormat::kDHWC8,      TensorFormat::kCDHW32,   TensorFormat::kHWC,
                                     TensorFormat::kDLA_LINEAR, TensorFormat::kDLA_HWC4, TensorFormat::kHWC16,
                                     TensorFormat::kDHWC};

template <typename T>
T* capability(IPluginV3& plugin, PluginCapabilityType type) {
    return static_cast<T*>(plugin.getCapabilityInterface(type));
}
nvinfer1::v_1_0::IPluginV3OneCore& core(IPluginV3& p) {
    return *capability<nvinfer1::v_1_0::IPluginV3OneCore>(p, PluginCapabilityType::kCORE);
}
nvinfer1::v_1_0::IPluginV3OneBuild& build(IPluginV3& p) {
    return *capability<nvinfer1::v_1_0::IPluginV3OneBuild>(p, PluginCapabilityType::kBUILD);
}
nvinfer1::v_1_0::IPluginV3OneRuntime& runtime(IPluginV3& p) {
    return *capability<nvinfer1::v_1_0::IPluginV3OneRuntime>(p, PluginCapabilityType::kRUNTIME);
}

Dims dims(std::initializer_list<int64_t> values) {
    Dims result{};
    result.nbDims = static_cast<int32_t>(values.size());
    std::copy(values.begin(), values.end(), result.d);
    return result;
}

struct Attributes {
    int32_t hq = 4, hkv = 2, d = 64, max_tree = 65, mode = 0;
    float scale = 0.125f;

    std::vector<PluginField> fields() const {
        return {{"num_q_heads", &hq, PluginFieldType::kINT32, 1}, {"num_kv_heads", &hkv, PluginFieldType::kINT32, 1},
                {"head_dim", &d, PluginFieldType::kINT32, 1},     {"max_tree", &max_tree, PluginFieldType::kINT32, 1},
                {"scale", &scale, PluginFieldType::kFLOAT32, 1},  {"mask_mode", &mode, PluginFieldType::kINT32, 1}};
    }
};

using Owned = std::unique_ptr<IPluginV3>;

Owned create(nvinfer1::v_1_0::IPluginCreatorV3One& creator, const std::vector<PluginField>& fields,
             TensorRTPhase phase = TensorRTPhase::kRUNTIME) {
    const PluginFieldCollection collection{static_cast<int32_t>(fields.size()), fields.data()};
    return Owned(creator.createPlugin("node", &collection, phase));
}

Creator<AttentionPlugin> attention_creator;
Creator<CompactPlugin> compact_creator;

std::array<PluginTensorDesc, 11> attention_tensors(const Attributes& a, int64_t n, int64_t t, int64_t slots, int64_t s,
                                                   DataType type) {
    const Dims q = dims({n, t, a.hq, a.d});
    const Dims kv = dims({n, t, a.hkv, a.d});
    const Dims past = dims({slots, a.hkv, s, a.d});
    const Dims of[] = {q, kv,   kv,  past, past, dims({n}), dims({n}), dims({n, t, (a.max_tree + 31) / 32}),
                       q, past, past};
    std::array<PluginTensorDesc, 11> tensors;
    for (size_t i = 0; i < tensors.size(); ++i) {
        const bool control = i >= 5 && i <= 7;
        tensors[i] = {of[i], control ? DataType::kINT32 : type, TensorFormat::kLINEAR, 1.0f};
    }
    return tensors;
}

template <size_t kCount>
std::vector<DynamicPluginTensorDesc> dynamic(const std::array<PluginTensorDesc, kCount>& tensors) {
    std::vector<DynamicPluginTensorDesc> result;
    for (const PluginTensorDesc& tensor : tensors) {
        result.push_back({tensor, tensor.dims, tensor.dims, tensor.dims});
    }
    return result;
}

// 16-byte aligned halves whose bits are small finite numbers in bf16 and fp16 alike.
struct Halves {
    explicit Halves(size_t count, uint32_t seed = 1) : memory(count + 8), data(memory.data()) {
        while (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
            ++data;
        }
        for (size_t i = 0; i < count; ++i) {
            seed = seed * 1664525u + 1013904223u;
            data[i] = static_cast<uint16_t>((seed >> 16 & 0x8000) | (0x3800 + (seed >> 20 & 0x7ff)));
        }
    }
    std::vector<uint16_t> memory;
    uint16_t* data;
};

}  // namespace
