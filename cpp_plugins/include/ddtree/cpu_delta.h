// Gated delta nets over the trees of several slots on a CPU: the operator `DDTreeDeltaNet` of ONNX Runtime, and the
// commit of its states.
//
// Each node goes on from its parent's state, a root from its slot's: S = a·S + k·d with d = b·(v − a·Sᵀk), o = Sᵀq.
// So a row's result is a function of its path alone, computed in one order: single tokens, rows of a prefill and nodes
// of any tree have equal bits, and so have the states of one commit and of many.
#pragma once

#include <cstdint>

#include "ddtree/cpu_attention.h"

namespace ddtree::cpu {

struct DeltaShape {
    int64_t key_heads;    // Hk, divides
    int64_t value_heads;  // Hv
    int64_t key_dim;      // Dk and Dv are multiples of 16
    int64_t value_dim;
    int64_t taps;  // rows of the causal convolution, the last its own

    int64_t keys() const { return key_heads * key_dim; }
    int64_t values() const { return value_heads * value_dim; }
    int64_t channels() const { return 2 * keys() + values(); }  // C: queries, keys, values
    int64_t projected() const { return channels() + values() + 2 * value_heads; }
    int64_t state() const { return key_dim * value_dim; }
    // Of a slot's layer: states [Hv, Dk, Dv], then the last inputs of the convolution [taps − 1, C], the oldest first.
    int64_t state_values() const { return value_heads * state() + (taps - 1) * channels(); }
    // Of a row's moves: its inputs of the convolution [C]; what comes out of it, queries and keys normed [C]; decays a
    // and steps b [Hv] each.
    int64_t moved_values() const { return 2 * (channels() + value_heads); }
};

struct DeltaPass {
    DeltaShape shape;
    float epsilon;  // of the norm of a head's output
    const SlotRows* slots;
    int64_t count;           // N; contexts and done are 0
    const int32_t* parents;  // of the slots' nodes, each counted from 0; −1 at a root
    const float* projected;  // [rows, projected()]: inputs of the convolution, gates z, steps, decays
    const float* conv;       // [taps, C]
    const float* decay;      // [Hv], negative
    const float* step_bias;  // [Hv]
    const float* head_norm;  // [Dv]
    const float* states;     // of the layer: [slots, state_values()]
    float* moves;            // of the layer: [rows, moved_values()], written
    float* out;              // [rows, Hv · Dv]
};

// Arguments must be valid; nothing is checked.
void delta(const DeltaPass& pass, const Parallel& parallel);

// Moves a slot's layer [state_values()] along rows [m] of the layer's moves, the nodes of a path from its root on.
void delta_commit(const DeltaShape& shape, float* state, const float* moves, const int32_t* rows, int64_t count);

}  // namespace ddtree::cpu
