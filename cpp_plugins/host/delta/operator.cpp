// `DDTreeDeltaNet` as an operator of ONNX Runtime: a gated delta net from projection to projection.
#include <cstring>

#include "ddtree/cpu_delta.h"
#include "ort.h"

namespace ddtree::ort {
namespace {

enum Input { PROJECTED, CONV, DECAY, STEP_BIAS, HEAD_NORM, SLOTS, PARENTS, STATES, MOVES, INPUTS };

struct Kernel {
    static constexpr const char* NAME = "DDTreeDeltaNet";
    static constexpr int TYPES[INPUTS] = {FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, INT64, INT32, FLOAT, FLOAT};
    cpu::DeltaShape shape;
    int64_t layer;
    float epsilon;

    OrtStatus* create(const OrtKernelInfo* info) {
        if (OrtStatus* status = read(info, {{"key_heads", &shape.key_heads},
                                            {"value_heads", &shape.value_heads},
                                            {"key_dim", &shape.key_dim},
                                            {"value_dim", &shape.value_dim},
                                            {"taps", &shape.taps},
                                            {"layer", &layer}})) {
            return status;
        }
        if (OrtStatus* status = call(GET_FLOAT, info, "epsilon", &epsilon)) return status;
        const auto positive = {shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim};
        for (const int64_t size : positive) {
            if (size < 1) return failed("DDTreeDeltaNet: attributes out of range");
        }
        if (shape.value_heads % shape.key_heads || shape.key_dim % 16 || shape.value_dim % 16 || shape.taps < 2 ||
            shape.taps > 16 || layer < 0) {
            return failed("DDTreeDeltaNet: attributes out of range");
        }
        return nullptr;
    }

    OrtStatus* compute(OrtKernelContext* context) const;
};

// What is wrong with a pass; "" if it may run. A wrong one would write outside of its arrays.
std::string misfit(const Kernel& k, const Tensor* in) {
    const cpu::DeltaShape& s = k.shape;
    const auto is = [](const Tensor& x, int64_t rows, int64_t width) {
        return x.leading() == rows && x.last() == width;
    };
    if (in[PROJECTED].last() != s.projected() || !is(in[CONV], s.taps, s.channels()) ||
        !is(in[DECAY], 1, s.value_heads) || !is(in[STEP_BIAS], 1, s.value_heads) ||
        !is(in[HEAD_NORM], 1, s.value_dim)) {
        return "projections and weights do not fit the heads";
    }
    const int64_t rows = in[PROJECTED].leading();
    const Shape states = in[STATES].shape, moves = in[MOVES].shape;
    if (states.size() != 3 || k.layer >= states[0] || states[2] != s.state_values() || moves.size() != 3 ||
        k.layer >= moves[0] || moves[1] < rows || moves[2] != s.moved_values()) {
        return "states or moves have another shape than the graph's";
    }
    if (in[SLOTS].last() != 5) return "slots must be [N, 5]";
    const auto* slots = static_cast<const cpu::SlotRows*>(in[SLOTS].data);
    const auto* parents = static_cast<const int32_t*>(in[PARENTS].data);
    const int64_t known = std::min(rows, in[PARENTS].last());
    int64_t nodes = 0;
    for (int64_t n = 0; n < in[SLOTS].leading(); ++n) {
        if (slots[n].slot < 0 || slots[n].slot >= states[1] || slots[n].contexts || slots[n].done ||
            slots[n].queries < 0 || slots[n].queries > known - nodes) {
            return "rows of slot " + std::to_string(slots[n].slot) + " are not those of a pass";
        }
        for (int64_t i = 0; i < slots[n].queries; ++i, ++nodes) {
            if (parents[nodes] < -1 || parents[nodes] >= i) return "parents are not those of trees";
        }
    }
    return nodes < rows ? "the pass has more rows than the slots" : "";
}

OrtStatus* Kernel::compute(OrtKernelContext* context) const {
    Tensor in[INPUTS];
    for (size_t i = 0; i < INPUTS; ++i) {
        if (OrtStatus* status = read(context, i, in[i])) return status;
    }
    if (const std::string wrong = misfit(*this, in); !wrong.empty()) return failed("DDTreeDeltaNet: " + wrong);
    const auto floats = [&](Input i) { return static_cast<float*>(in[i].data); };
    float* out = nullptr;
    if (OrtStatus* status = output(context, {1, in[PROJECTED].leading(), shape.values()}, &out)) return status;
    const cpu::DeltaPass pass{shape,
                              epsilon,
                              static_cast<const cpu::SlotRows*>(in[SLOTS].data),
                              in[SLOTS].leading(),
                              static_cast<const int32_t*>(in[PARENTS].data),
                              floats(PROJECTED),
                              floats(CONV),
                              floats(DECAY),
                              floats(STEP_BIAS),
                              floats(HEAD_NORM),
                              floats(STATES) + layer * in[STATES].shape[1] * shape.state_values(),
                              floats(MOVES) + layer * in[MOVES].shape[1] * shape.moved_values(),
                              out};
    cpu::delta(pass, parallel_in(context));
    return nullptr;
}

}  // namespace

const Operator* delta_net() { return record<Kernel>(); }

}  // namespace ddtree::ort
