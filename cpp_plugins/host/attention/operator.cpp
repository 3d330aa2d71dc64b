// `DDTreeAttention` as an operator of ONNX Runtime, and the function that registers all of ours.
#include <algorithm>
#include <cstring>

#include "ort.h"

#ifdef _WIN32
#define DDTREE_EXPORT __declspec(dllexport)
#else
#define DDTREE_EXPORT __attribute__((visibility("default")))
#endif

namespace ddtree::ort {
namespace {

using cpu::AttentionPass;
using cpu::CacheShape;
using cpu::Sees;
using cpu::SlotRows;
using cpu::Stored;

enum Input { QUERY, KEY, VALUE, COS, SIN, SLOTS, PARENTS, CACHE, INPUTS };

struct Kernel {
    static constexpr const char* NAME = "DDTreeAttention";
    static constexpr int TYPES[INPUTS] = {FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, INT64, INT32, UINT8};
    int64_t heads, kv_heads, head_dim, rows, layer, window, sees, stored;

    OrtStatus* create(const OrtKernelInfo* info);
    OrtStatus* compute(OrtKernelContext* context) const;
};

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

OrtStatus* Kernel::compute(OrtKernelContext* context) const {
    Tensor in[INPUTS];
    for (size_t i = 0; i < INPUTS; ++i) {
        if (OrtStatus* status = read(context, i, in[i])) return status;
    }
    const CacheShape shape{kv_heads, head_dim, rows, static_cast<Stored>(stored)};
    const auto* slots = static_cast<const SlotRows*>(in[SLOTS].data);
    const int64_t count = in[SLOTS].leading();
    if (const std::string wrong = misfit(*this, shape, in, slots, count); !wrong.empty()) {
        return failed("DDTreeAttention: " + wrong);
    }
    int64_t contexts = 0, covered = 0;
    for (int64_t n = 0; n < count; ++n) {
        contexts += slots[n].contexts;
        covered += slots[n].queries;
    }
    const int64_t nodes = in[KEY].leading() - contexts, width = heads * head_dim;
    float* out = nullptr;
    if (OrtStatus* status = output(context, {1, nodes, width}, &out)) return status;
    // Rows of no slot: another row's neighbours, whose values nobody reads.
    std::memset(out + covered * width, 0, (nodes - covered) * width * sizeof(float));
    const int64_t layer_bytes = in[CACHE].shape[1] * shape.slot_bytes();
    const AttentionPass pass{shape,
                             heads,
                             static_cast<Sees>(sees),
                             window,
                             in[COS].last(),
                             static_cast<const float*>(in[COS].data),
                             static_cast<const float*>(in[SIN].data),
                             slots,
                             count,
                             static_cast<const int32_t*>(in[PARENTS].data),
                             static_cast<const float*>(in[QUERY].data),
                             static_cast<const float*>(in[KEY].data),
                             static_cast<const float*>(in[VALUE].data),
                             static_cast<unsigned char*>(in[CACHE].data) + layer * layer_bytes,
                             shape.slot_bytes(),
                             out};
    cpu::attend(pass, parallel_in(context));
    return nullptr;
}

OrtStatus* Kernel::create(const OrtKernelInfo* info) {
    if (OrtStatus* status = read(info, {{"num_q_heads", &heads},
                                        {"num_kv_heads", &kv_heads},
                                        {"head_dim", &head_dim},
                                        {"rows", &rows},
                                        {"layer", &layer},
                                        {"window", &window},
                                        {"mask_mode", &sees},
                                        {"half", &stored}})) {
        return status;
    }
    if (heads < 1 || kv_heads < 1 || heads % kv_heads || head_dim < 1 || rows < 1 || rows % cpu::UNIT || layer < 0 ||
        window < 0 || sees < 0 || sees > 2 || stored < 0 || stored > 1) {
        return failed("DDTreeAttention: attributes out of range");
    }
    return nullptr;
}

}  // namespace

const Operator* attention() { return record<Kernel>(); }

}  // namespace ddtree::ort

extern "C" DDTREE_EXPORT ddtree::ort::OrtStatus* RegisterCustomOps(ddtree::ort::OrtSessionOptions* options,
                                                                   const ddtree::ort::OrtApiBase* base) {
    using namespace ddtree::ort;
    api = static_cast<void* const*>(base->get_api(API_VERSION));
    if (api == nullptr) {
        return nullptr;  // an older runtime: the session then refuses the graph for its unknown operators
    }
    OrtCustomOpDomain* domain = nullptr;
    if (OrtStatus* status = call(CREATE_DOMAIN, "ddtree", &domain)) return status;
    for (const Operator* op : {attention(), delta_net(), product()}) {
        if (OrtStatus* status = call(DOMAIN_ADD, domain, op)) return status;
    }
    return call(ADD_DOMAIN, options, domain);
}
