// The operations between a layer's matrix products, each in one pass over its rows: norms, rotary embedding, SwiGLU.
//
// Elements are 16-bit; arithmetic is in float32 and rounded once at its end.
#pragma once

#include "ddtree/attention.h"

namespace ddtree {

// sum = x + update, and the RMS norm of the rounded sum.
struct AddNorm {
    const void* x;       // [rows, width]
    const void* update;  // [rows, width]; null: the norm of x alone, and sum is not written
    const void* weight;  // [width]
    void* sum;           // [rows, width]; may be x
    void* normed;        // [rows, width]
    int32_t rows;
    int32_t width;  // a multiple of 8
    ElementType type;
    float epsilon;
};
Status add_rms_norm(const AddNorm& call, Stream stream);

// The fused projection's output as queries, keys and values: heads normed, queries and keys rotated by their positions.
struct SplitQkv {
    const void* qkv;           // [rows, Hq + 2 Hkv, D]
    const void* q_norm;        // [D]
    const void* k_norm;        // [D]
    const float* tables;       // [2, table_rows, D]: cosines, and sines with the first half negated
    const int32_t* positions;  // [rows] on the device, clamped to 0 ... table_rows - 1
    void* q;                   // [rows, Hq, D]
    void* k;                   // [rows, Hkv, D]
    void* v;                   // [rows, Hkv, D]
    int32_t rows;
    int32_t q_heads;
    int32_t kv_heads;
    int32_t head_dim;  // D: 64 or 128
    int32_t table_rows;
    ElementType type;
    float epsilon;
};
Status split_qkv(const SplitQkv& call, Stream stream);

// out = silu(gate) * up.
struct SwiGlu {
    const void* gate_up;  // [rows, 2, inner]
    void* out;            // [rows, inner]
    int32_t rows;
    int32_t inner;  // a multiple of 8
    ElementType type;
};
Status swiglu(const SwiGlu& call, Stream stream);

}  // namespace ddtree
