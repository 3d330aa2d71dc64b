// Grouped-query attention over the trees of several slots on a CPU: the operator `DDTreeAttention` of ONNX Runtime.
//
// A row's result is a function of its query and of the keys and values by *position*, and of nothing else: neither of
// the number of rows, of slots or of threads, nor of where in the cache an ancestor's row lies. So single tokens, rows
// of a prefill and nodes of any tree have equal bits. Keys are taken in units of UNIT positions and units in parts of
// PART; a part is an online softmax begun anew, whose units follow each other by position, and the parts are joined
// from left to right. In a unit a key's lane is its position, and a hidden lane adds exactly nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace ddtree::cpu {

constexpr int64_t UNIT = 64;
constexpr int64_t PART = 512;

// What a cache holds: float, or bfloat16 whose products are summed in float.
enum class Stored : int32_t { FLOAT = 0, BFLOAT16 = 1 };

// A layer's cache of one slot: per key head, units of keys then units of values.
//   FLOAT:    keys [S / UNIT, D, UNIT] and values [S, padded(D)]
//   BFLOAT16: keys [S / UNIT, ceil(D / 2), UNIT] of pairs of elements, values [S / 2, padded(D)] of pairs of rows
// S is a multiple of UNIT. An even element or row is in a pair's lower half.
struct CacheShape {
    int64_t kv_heads;
    int64_t head_dim;
    int64_t rows;
    Stored stored;

    int64_t padded() const { return (head_dim + 15) / 16 * 16; }
    // Bytes of a head's keys, of its values, of both, and of a slot's layer.
    int64_t key_bytes() const { return rows * (stored == Stored::FLOAT ? head_dim * 4 : (head_dim + 1) / 2 * 4); }
    int64_t value_bytes() const { return rows * padded() * (stored == Stored::FLOAT ? 4 : 2); }
    int64_t head_bytes() const { return key_bytes() + value_bytes(); }
    int64_t slot_bytes() const { return kv_heads * head_bytes(); }
};

enum class Sees : int32_t {  // as DDTreeAttention's mask_mode
    ANCESTORS = 0,           // the past, its ancestors by `parents`, itself
    EARLIER = 1,             // the rows before it, itself
    ALL = 2,                 // every row of the slot
};

// A slot's rows in a pass. Behind the `past` rows of its cache come `contexts` rows of keys alone, `done` nodes whose
// keys are in the cache already, and `queries` nodes. In every array of rows the slots follow each other; those of keys
// have the contexts of all slots, then the nodes of all.
struct SlotRows {
    int64_t slot;
    int64_t past;
    int64_t contexts;
    int64_t done;
    int64_t queries;
};

struct AttentionPass {
    CacheShape cache;
    int64_t heads;  // query heads
    Sees sees;
    int64_t window;    // a row sees positions less than this far away; 0: all
    int64_t rotary;    // pairs of elements that are rotated: the tables' width
    const float* cos;  // [rows, rotary]
    const float* sin;
    const SlotRows* slots;
    int64_t count;           // N
    const int32_t* parents;  // of the slots' nodes, done and queries, each counted from 0; −1 at a root; ANCESTORS only
    const float* query;      // [rows, heads · D]; those of contexts are not read
    const float* key;        // [rows, kv_heads · D]
    const float* value;      // [rows, kv_heads · D]
    unsigned char* storage;  // of the layer: [slots, slot_bytes]
    int64_t slot_stride;     // bytes from slot to slot
    float* out;              // [queries, heads · D]
};

// Runs task(0) … task(count − 1), on any threads.
using Parallel = std::function<void(size_t count, const std::function<void(size_t)>& task)>;

// Writes the keys and values of a pass and attends. Arguments must be valid; nothing is checked.
void attend(const AttentionPass& pass, const Parallel& parallel);

// In a slot's cache of one layer row start + keep[j] becomes row start + j: the stage `commit`. keep [m] must be
// strictly increasing and not negative, which makes keep[j] >= j: moving in rising order never overwrites a row still
// to be read.
void compact(const CacheShape& shape, unsigned char* slot, int64_t start, const int32_t* keep, int64_t kept);

// The instruction set that the operators use here: "avx512-bf16", "avx512-vnni", "avx512", "avx2" or "plain".
const char* attention_isa();

}  // namespace ddtree::cpu
