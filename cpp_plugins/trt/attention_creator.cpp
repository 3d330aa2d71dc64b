#include "attention_creator.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <string>

namespace ddtree::trt {

namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

// Reads one attribute, for which the ONNX parser and the engine may pass a wider type. Returns an error text, or none.
std::string read(const PluginField& field, int32_t& value) {
    if (field.data == nullptr || field.length != 1) {
        return std::string(field.name) + " must have one value";
    }
    if (field.type == PluginFieldType::kINT32) {
        value = *static_cast<const int32_t*>(field.data);
        return {};
    }
    if (field.type == PluginFieldType::kINT64) {
        const int64_t wide = *static_cast<const int64_t*>(field.data);
        value = static_cast<int32_t>(wide);
        return value == wide ? std::string() : std::string(field.name) + " is out of range";
    }
    return std::string(field.name) + " must be an integer";
}

std::string read(const PluginField& field, float& value) {
    if (field.data == nullptr || field.length != 1) {
        return std::string(field.name) + " must have one value";
    }
    if (field.type == PluginFieldType::kFLOAT32) {
        value = *static_cast<const float*>(field.data);
        return {};
    }
    if (field.type == PluginFieldType::kFLOAT64) {
        value = static_cast<float>(*static_cast<const double*>(field.data));
        return {};
    }
    return std::string(field.name) + " must be a float";
}

std::string read(const PluginField& field, int64_t& value) {
    if (field.data == nullptr || field.length != 1 || field.type != PluginFieldType::kINT64) {
        return std::string(field.name) + " must have one 64-bit integer";
    }
    value = *static_cast<const int64_t*>(field.data);
    return value >= AttentionAttributes::kUnknown ? std::string() : std::string(field.name) + " must not be negative";
}

std::string parse(const nvinfer1::PluginFieldCollection* fields, TensorRTPhase phase, AttentionAttributes& a) {
    if (fields == nullptr || (fields->nbFields > 0 && fields->fields == nullptr)) {
        return "no attributes given";
    }
    struct Slot {
        const char* name;
        int32_t* integer;
        float* real;
        bool found;
    };
    Slot slots[] = {{"num_q_heads", &a.num_q_heads, nullptr, false},
                    {"num_kv_heads", &a.num_kv_heads, nullptr, false},
                    {"head_dim", &a.head_dim, nullptr, false},
                    {"max_tree", &a.max_tree, nullptr, false},
                    {"scale", nullptr, &a.scale, false},
                    {"mask_mode", &a.mask_mode, nullptr, false}};
    for (int32_t i = 0; i < fields->nbFields; ++i) {
        const PluginField& field = fields->fields[i];
        const std::string name = field.name == nullptr ? "" : field.name;
        if (name == "workspace_bytes" && phase == TensorRTPhase::kRUNTIME) {
            const std::string wrong = read(field, a.workspace_bytes);
            if (!wrong.empty()) {
                return wrong;
            }
            continue;
        }
        Slot* slot = std::find_if(std::begin(slots), std::end(slots), [&](const Slot& s) { return name == s.name; });
        if (slot == std::end(slots)) {
            return "unknown attribute '" + name + "'";
        }
        const std::string wrong = slot->integer != nullptr ? read(field, *slot->integer) : read(field, *slot->real);
        if (!wrong.empty()) {
            return wrong;
        }
        slot->found = true;
    }
    for (const Slot& slot : slots) {
        if (!slot.found) {
            return std::string("attribute ") + slot.name + " is missing";
        }
    }
    if (a.num_kv_heads < 1 || a.num_q_heads < a.num_kv_heads || a.num_q_heads % a.num_kv_heads != 0) {
        return "num_q_heads must be a multiple of num_kv_heads, found " + std::to_string(a.num_q_heads) + " and " +
               std::to_string(a.num_kv_heads);
    }
    if (a.head_dim != 64 && a.head_dim != 128) {
        return "head_dim must be 64 or 128, found " + std::to_string(a.head_dim);
    }
    if (a.max_tree < 1) {
        return "max_tree must be positive, found " + std::to_string(a.max_tree);
    }
    if (!(a.scale > 0.0f && a.scale < 1e6f)) {
        return "scale must be positive and finite, found " + std::to_string(a.scale);
    }
    if (a.mask_mode < 0 || a.mask_mode > 2) {
        return "mask_mode must be 0 (tree), 1 (causal) or 2 (none), found " + std::to_string(a.mask_mode);
    }
    return {};
}

}  // namespace

AttentionCreator::AttentionCreator() {
    for (const char* name : {"num_q_heads", "num_kv_heads", "head_dim", "max_tree"}) {
        fields_.emplace_back(name, nullptr, PluginFieldType::kINT32, 1);
    }
    fields_.emplace_back("scale", nullptr, PluginFieldType::kFLOAT32, 1);
    fields_.emplace_back("mask_mode", nullptr, PluginFieldType::kINT32, 1);
    collection_.nbFields = static_cast<int32_t>(fields_.size());
    collection_.fields = fields_.data();
}

nvinfer1::IPluginV3* AttentionCreator::createPlugin(const char*, const nvinfer1::PluginFieldCollection* fields,
                                                    TensorRTPhase phase) noexcept {
    try {
        AttentionAttributes attributes;
        const std::string wrong = parse(fields, phase, attributes);
        if (!wrong.empty()) {
            failure(AttentionPlugin::kName, wrong);
            return nullptr;
        }
        return new AttentionPlugin(attributes, phase);
    } catch (const std::exception& error) {
        failure(AttentionPlugin::kName, error.what());
        return nullptr;
    }
}

}  // namespace ddtree::trt
