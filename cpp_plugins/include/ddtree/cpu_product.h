// Products of rows with a weight of 8-bit integers on a CPU: the operator `DDTreeProduct` of ONNX Runtime.
//
// A row is rounded to integers of at most 127 with a scale of its own, its products are summed as integers, exactly,
// and each sum is multiplied by the scales of its row and of its output. So a row's result depends on that row alone.
#pragma once

#include <cstdint>

#include "ddtree/cpu_attention.h"

namespace ddtree::cpu {

constexpr int64_t PANEL = 16;  // outputs whose weights lie together
constexpr int64_t STEP = 4;    // inputs of an output that do

struct ProductPass {
    int64_t rows, inputs, outputs;
    int64_t fine;           // so many last outputs add a second product, whose columns come behind
    int64_t parts;          // 0, or x has rows of gate and up, and a row is silu(gate) · up, whose `parts` parts,
                            // a power of two, pass through a Walsh–Hadamard transform
    const float* x;         // [rows, inputs], [rows, 2 · inputs] of gate and up
    const uint8_t* weight;  // 128 more than the integers: [columns / PANEL, ceil(inputs / STEP), PANEL, STEP]
    const float* scale;     // [columns]: outputs + fine
    float* out;             // [rows, outputs]

    bool gated() const { return parts != 0; }
    int64_t steps() const { return (inputs + STEP - 1) / STEP; }
    int64_t panels() const { return (outputs + fine + PANEL - 1) / PANEL; }
};

// Arguments must be valid; nothing is checked.
void multiply(const ProductPass& pass, const Parallel& parallel);

}  // namespace ddtree::cpu
