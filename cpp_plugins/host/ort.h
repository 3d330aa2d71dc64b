// What operators of ONNX Runtime need of it, for `SessionOptions.register_custom_ops_library`. No Python package has
// ONNX Runtime's C header, and an operator needs little of it: entries of a table that only ever grows at its end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "ddtree/cpu_attention.h"

namespace ddtree::ort {

struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtValue;
struct OrtApiBase {
    const void* (*get_api)(uint32_t version);
    const char* (*get_version)();
};

constexpr uint32_t API_VERSION = 24;  // of ONNX Runtime 1.24, the first to lend a tensor's shape
enum Entry {
    CREATE_STATUS = 0,
    CREATE_DOMAIN = 26,
    DOMAIN_ADD = 27,
    ADD_DOMAIN = 28,
    GET_DATA = 51,
    GET_FLOAT = 85,
    GET_INT = 86,
    GET_INPUT = 90,
    GET_OUTPUT = 91,
    RELEASE_STATUS = 93,
    PARALLEL_FOR = 274,
    GET_SHAPE = 414,
};

inline void* const* api = nullptr;

template <class... Args>
OrtStatus* call(Entry entry, Args... args) {
    return reinterpret_cast<OrtStatus* (*)(Args...)>(api[entry])(args...);
}
template <class Argument>
void release(Entry entry, Argument* x) {
    reinterpret_cast<void (*)(Argument*)>(api[entry])(x);
}

inline OrtStatus* failed(const std::string& message) {
    constexpr int INVALID_ARGUMENT = 2;
    return call(CREATE_STATUS, INVALID_ARGUMENT, message.c_str());
}

// The operator's record, as API version 17 reads it. Those that are null have defaults.
struct Operator {
    uint32_t version;
    void* (*create_kernel)(const Operator*, const void*, const OrtKernelInfo*);
    const char* (*get_name)(const Operator*);
    const char* (*get_provider)(const Operator*);
    int (*input_type)(const Operator*, size_t);
    size_t (*input_count)(const Operator*);
    int (*output_type)(const Operator*, size_t);
    size_t (*output_count)(const Operator*);
    void (*compute)(void*, OrtKernelContext*);
    void (*destroy)(void*);
    int (*input_characteristic)(const Operator*, size_t);
    int (*output_characteristic)(const Operator*, size_t);
    int (*input_memory)(const Operator*, size_t);
    int (*input_min_arity)(const Operator*);
    int (*input_homogeneous)(const Operator*);
    int (*output_min_arity)(const Operator*);
    int (*output_homogeneous)(const Operator*);
    OrtStatus* (*create_kernel_v2)(const Operator*, const void*, const OrtKernelInfo*, void**);
    OrtStatus* (*compute_v2)(void*, OrtKernelContext*);
    void* infer_shape;
    int (*start_version)(const Operator*);
    int (*end_version)(const Operator*);
};

constexpr int FLOAT = 1, UINT8 = 2, INT32 = 6, INT64 = 7;

// A shape that ONNX Runtime holds.
struct Shape {
    const int64_t* dims = nullptr;
    size_t count = 0;

    size_t size() const { return count; }
    int64_t operator[](size_t i) const { return dims[i]; }
    bool is(std::initializer_list<int64_t> other) const {
        return std::equal(dims, dims + count, other.begin(), other.end());
    }
};

struct Tensor {
    Shape shape;
    void* data = nullptr;

    int64_t leading() const {  // the product of all dimensions but the last
        int64_t n = 1;
        for (size_t i = 0; i + 1 < shape.size(); ++i) n *= shape[i];
        return n;
    }
    int64_t last() const { return shape.size() ? shape[shape.size() - 1] : 1; }
};

inline OrtStatus* read(const OrtKernelContext* context, size_t index, Tensor& tensor) {
    const OrtValue* value = nullptr;
    if (OrtStatus* status = call(GET_INPUT, context, index, &value)) return status;
    int type = 0;
    if (OrtStatus* status = call(GET_SHAPE, value, &type, &tensor.shape.dims, &tensor.shape.count)) return status;
    return call(GET_DATA, const_cast<OrtValue*>(value), &tensor.data);
}

// The operator's only output, float of that shape.
inline OrtStatus* output(OrtKernelContext* context, const std::vector<int64_t>& shape, float** data) {
    OrtValue* value = nullptr;
    if (OrtStatus* status = call(GET_OUTPUT, context, size_t{0}, shape.data(), shape.size(), &value)) return status;
    void* found = nullptr;
    OrtStatus* status = call(GET_DATA, value, &found);
    *data = static_cast<float*>(found);
    return status;
}

// Runs tasks on the session's threads.
inline cpu::Parallel parallel_in(OrtKernelContext* context) {
    return [context](size_t tasks, const std::function<void(size_t)>& task) {
        const auto run = [](void* f, size_t i) { (*static_cast<const std::function<void(size_t)>*>(f))(i); };
        void (*plain)(void*, size_t) = run;
        void* data = const_cast<std::function<void(size_t)>*>(&task);
        if (OrtStatus* status =
                call(PARALLEL_FOR, static_cast<const OrtKernelContext*>(context), plain, tasks, size_t{0}, data)) {
            release(RELEASE_STATUS, status);
            for (size_t i = 0; i < tasks; ++i) task(i);
        }
    };
}

struct Attribute {
    const char* name;
    int64_t* value;
};

inline OrtStatus* read(const OrtKernelInfo* info, std::initializer_list<Attribute> attributes) {
    for (const Attribute& attribute : attributes) {
        if (OrtStatus* status = call(GET_INT, info, attribute.name, attribute.value)) return status;
    }
    return nullptr;
}

// The record of an operator with one output of floats. `Kernel` has its name NAME, the TYPES of its inputs and the
// functions create and compute.
template <class Kernel>
const Operator* record() {
    static Operator op{};
    op.version = 17;  // that of the record
    op.get_name = [](const Operator*) { return Kernel::NAME; };
    op.get_provider = [](const Operator*) -> const char* { return nullptr; };  // the CPU's
    op.input_type = [](const Operator*, size_t i) { return Kernel::TYPES[i]; };
    op.input_count = [](const Operator*) -> size_t { return std::size(Kernel::TYPES); };
    op.output_type = [](const Operator*, size_t) { return FLOAT; };
    op.output_count = [](const Operator*) -> size_t { return 1; };
    const auto required = [](const Operator*, size_t) { return 0; };
    op.input_characteristic = required;
    op.output_characteristic = required;
    op.input_memory = required;
    op.input_min_arity = [](const Operator*) { return 1; };
    op.input_homogeneous = op.input_min_arity;
    op.output_min_arity = op.input_min_arity;
    op.output_homogeneous = op.input_min_arity;
    op.create_kernel_v2 = [](const Operator*, const void*, const OrtKernelInfo* info, void** kernel) -> OrtStatus* {
        auto made = std::make_unique<Kernel>();
        OrtStatus* status = made->create(info);
        if (status == nullptr) *kernel = made.release();
        return status;
    };
    op.compute_v2 = [](void* kernel, OrtKernelContext* context) {
        return static_cast<const Kernel*>(kernel)->compute(context);
    };
    op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    op.start_version = [](const Operator*) { return 1; };
    op.end_version = [](const Operator*) { return 0x7fffffff; };
    return &op;
}

// The operators.
const Operator* attention();
const Operator* delta_net();
const Operator* product();

}  // namespace ddtree::ort
