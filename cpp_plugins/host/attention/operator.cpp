// `DDTreeAttention` as an operator of ONNX Runtime, for `SessionOptions.register_custom_ops_library`. No Python package
// has ONNX Runtime's C header, and an operator needs little of it: entries of a table that only ever grows at its end.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ddtree/cpu_attention.h"

#ifdef _WIN32
#define DDTREE_EXPORT __declspec(dllexport)
#else
#define DDTREE_EXPORT __attribute__((visibility("default")))
#endif

namespace {

using ddtree::cpu::AttentionPass;
using ddtree::cpu::CacheShape;
using ddtree::cpu::Sees;
using ddtree::cpu::SlotRows;
using ddtree::cpu::Stored;

struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtValue;
struct OrtShape;
struct OrtApiBase {
    const void* (*get_api)(uint32_t version);
    const char* (*get_version)();
};

constexpr uint32_t API_VERSION = 17;  // of ONNX Runtime 1.17, the first with ParallelFor
enum Entry {
    CREATE_STATUS = 0,
    CREATE_DOMAIN = 26,
    DOMAIN_ADD = 27,
    ADD_DOMAIN = 28,
    GET_DATA = 51,
    GET_DIMENSIONS_COUNT = 61,
    GET_DIMENSIONS = 62,
    GET_SHAPE = 65,
    GET_INT = 86,
    GET_INPUT = 90,
    GET_OUTPUT = 91,
    RELEASE_STATUS = 93,
    RELEASE_SHAPE = 99,
    PARALLEL_FOR = 274,
};

void* const* api = nullptr;

template <class... Args>
OrtStatus* call(Entry entry, Args... args) {
    return reinterpret_cast<OrtStatus* (*)(Args...)>(api[entry])(args...);
}
template <class Argument>
void release(Entry entry, Argument* x) {
    reinterpret_cast<void (*)(Argument*)>(api[entry])(x);
}

OrtStatus* failed(const std::string& message) {
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

enum Input { QUERY, KEY, VALUE, COS, SIN, SLOTS, PARENTS, CACHE, INPUTS };
constexpr int FLOAT = 1, UINT8 = 2, INT32 = 6, INT64 = 7;
constexpr int TYPES[INPUTS] = {FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, INT64, INT32, UINT8};

struct Kernel {
    int64_t heads, kv_heads, head_dim, rows, layer, window, sees, stored;
};

struct Tensor {
    std::vector<int64_t> shape;
    void* data = nullptr;

    int64_t leading() const {  // the product of all dimensions but the last
        int64_t n = 1;
        for (size_t i = 0; i + 1 < shape.size(); ++i) n *= shape[i];
        return n;
    }
    int64_t last() const { return shape.empty() ? 1 : shape.back(); }
};

OrtStatus* read(const OrtKernelContext* context, size_t index, Tensor& tensor) {
    const OrtValue* value = nullptr;
    if (OrtStatus* status = call(GET_INPUT, context, index, &value)) return status;
    OrtShape* shape = nullptr;
    if (OrtStatus* status = call(GET_SHAPE, value, &shape)) return status;
    std::unique_ptr<OrtShape, void (*)(OrtShape*)> owner(shape, [](OrtShape* s) { release(RELEASE_SHAPE, s); });
    size_t count = 0;
    if (OrtStatus* status = call(GET_DIMENSIONS_COUNT, static_cast<const OrtShape*>(shape), &count)) return status;
    tensor.shape.resize(count);
    if (OrtStatus* status = call(GET_DIMENSIONS, static_cast<const OrtShape*>(shape), tensor.shape.data(), count)) {
        return status;
    }
    return call(GET_DATA, const_cast<OrtValue*>(value), &tensor.data);
}

// What is wrong with a pass; "" if it may run. A wrong one would write outside of the cache.
std::string misfit(const Kernel& k, const CacheShape& shape, const Tensor* in, const SlotRows* slots, int64_t count) {
    const int64_t rows = in[KEY].leading(), layers = in[CACHE].shape.size() == 4 ? in[CACHE].shape[0] : 0;
    if (in[QUERY].last() != k.heads * k.head_dim || in[KEY].last() != k.kv_heads * k.head_dim ||
        in[VALUE].last() != k.kv_heads * k.head_dim || in[QUERY].leading() != rows || in[VALUE].leading() != rows) {
        return "query, key and value do not fit the heads";
    }
    if (k.layer >= layers || in[CACHE].shape[2] != k.kv_heads || in[CACHE].shape[3] != shape.head_bytes()) {
        return "the cache has another shape than the graph's";
    }
    if (in[COS].last() != in[SIN].last() || 2 * in[COS].last() > k.head_dim || in[COS].leading() != in[SIN].leading()) {
        return "the rotary tables do not fit the head size";
    }
    if (in[SLOTS].last() != 5) return "slots must be [N, 5]";
    const int64_t known = in[PARENTS].last();
    const auto* parents = static_cast<const int32_t*>(in[PARENTS].data);
    int64_t taken = 0, nodes = 0;
    for (int64_t n = 0; n < count; ++n) {
        const SlotRows& s = slots[n];
        if (s.slot < 0 || s.slot >= in[CACHE].shape[1] || s.past < 0 || s.contexts < 0 || s.done < 0 || s.queries < 0 ||
            s.past + s.contexts + s.done + s.queries > std::min(k.rows, in[COS].leading())) {
            return "rows of slot " + std::to_string(s.slot) + " do not fit its cache";
        }
        taken += s.contexts + s.queries;
        if (k.sees == static_cast<int64_t>(Sees::ANCESTORS)) {
            for (int64_t i = 0; i < s.done + s.queries; ++i, ++nodes) {
                if (nodes >= known || parents[nodes] < -1 || parents[nodes] >= i)
                    return "parents are not those of trees";
            }
        }
    }
    return taken > rows ? "the slots have more rows than the pass" : "";
}

OrtStatus* compute(void* state, OrtKernelContext* context) {
    const Kernel& k = *static_cast<const Kernel*>(state);
    Tensor in[INPUTS];
    for (size_t i = 0; i < INPUTS; ++i) {
        if (OrtStatus* status = read(context, i, in[i])) return status;
    }
    const CacheShape shape{k.kv_heads, k.head_dim, k.rows, static_cast<Stored>(k.stored)};
    const auto* slots = static_cast<const SlotRows*>(in[SLOTS].data);
    const int64_t count = in[SLOTS].leading();
    if (const std::string wrong = misfit(k, shape, in, slots, count); !wrong.empty()) {
        return failed("DDTreeAttention: " + wrong);
    }
    int64_t contexts = 0, covered = 0;
    for (int64_t n = 0; n < count; ++n) {
        contexts += slots[n].contexts;
        covered += slots[n].queries;
    }
    const int64_t size[] = {1, in[KEY].leading() - contexts, k.heads * k.head_dim};
    OrtValue* value = nullptr;
    if (OrtStatus* status =
            call(GET_OUTPUT, context, size_t{0}, static_cast<const int64_t*>(size), size_t{3}, &value)) {
        return status;
    }
    void* out = nullptr;
    if (OrtStatus* status = call(GET_DATA, value, &out)) return status;
    // Rows of no slot: another row's neighbours, whose values nobody reads.
    std::memset(static_cast<float*>(out) + covered * size[2], 0, (size[1] - covered) * size[2] * sizeof(float));
    const int64_t layer_bytes = in[CACHE].shape[1] * shape.slot_bytes();
    const AttentionPass pass{shape,
                             k.heads,
                             static_cast<Sees>(k.sees),
                             k.window,
                             in[COS].last(),
                             static_cast<const float*>(in[COS].data),
                             static_cast<const float*>(in[SIN].data),
                             slots,
                             count,
                             static_cast<const int32_t*>(in[PARENTS].data),
                             static_cast<const float*>(in[QUERY].data),
                             static_cast<const float*>(in[KEY].data),
                             static_cast<const float*>(in[VALUE].data),
                             static_cast<unsigned char*>(in[CACHE].data) + k.layer * layer_bytes,
                             shape.slot_bytes(),
                             static_cast<float*>(out)};
    const ddtree::cpu::Parallel parallel = [context](size_t tasks, const std::function<void(size_t)>& task) {
        const auto run = [](void* f, size_t i) { (*static_cast<const std::function<void(size_t)>*>(f))(i); };
        void (*plain)(void*, size_t) = run;
        void* data = const_cast<std::function<void(size_t)>*>(&task);
        if (OrtStatus* status =
                call(PARALLEL_FOR, static_cast<const OrtKernelContext*>(context), plain, tasks, size_t{0}, data)) {
            release(RELEASE_STATUS, status);
            for (size_t i = 0; i < tasks; ++i) task(i);
        }
    };
    ddtree::cpu::attend(pass, parallel);
    return nullptr;
}

OrtStatus* create(const Operator*, const void*, const OrtKernelInfo* info, void** kernel) {
    auto k = std::make_unique<Kernel>();
    const struct {
        const char* name;
        int64_t* value;
    } attributes[] = {
        {"num_q_heads", &k->heads}, {"num_kv_heads", &k->kv_heads}, {"head_dim", &k->head_dim}, {"rows", &k->rows},
        {"layer", &k->layer},       {"window", &k->window},         {"mask_mode", &k->sees},    {"half", &k->stored}};
    for (const auto& attribute : attributes) {
        if (OrtStatus* status = call(GET_INT, info, attribute.name, attribute.value)) return status;
    }
    if (k->heads < 1 || k->kv_heads < 1 || k->heads % k->kv_heads || k->head_dim < 1 || k->rows < 1 ||
        k->rows % ddtree::cpu::UNIT || k->layer < 0 || k->window < 0 || k->sees < 0 || k->sees > 2 || k->stored < 0 ||
        k->stored > 1) {
        return failed("DDTreeAttention: attributes out of range");
    }
    *kernel = k.release();
    return nullptr;
}

const Operator* the_operator() {
    static Operator op{};
    op.version = API_VERSION;
    op.get_name = [](const Operator*) { return "DDTreeAttention"; };
    op.get_provider = [](const Operator*) -> const char* { return nullptr; };  // the CPU's
    op.input_type = [](const Operator*, size_t i) { return TYPES[i]; };
    op.input_count = [](const Operator*) -> size_t { return INPUTS; };
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
    op.create_kernel_v2 = create;
    op.compute_v2 = compute;
    op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    op.start_version = [](const Operator*) { return 1; };
    op.end_version = [](const Operator*) { return 0x7fffffff; };
    return &op;
}

}  // namespace

extern "C" DDTREE_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
    api = static_cast<void* const*>(base->get_api(API_VERSION));
    if (api == nullptr) {
        return nullptr;  // an older runtime: the session then refuses the graph for its unknown operator
    }
    OrtCustomOpDomain* domain = nullptr;
    if (OrtStatus* status = call(CREATE_DOMAIN, "ddtree", &domain)) return status;
    if (OrtStatus* status = call(DOMAIN_ADD, domain, the_operator())) return status;
    return call(ADD_DOMAIN, options, domain);
}
