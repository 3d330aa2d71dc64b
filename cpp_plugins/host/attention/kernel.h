// What the versions of kernel.inl and their caller share.
#pragma once

#include "ddtree/cpu_attention.h"

namespace ddtree::cpu {

// x [D] is a head's vector rotated to a position: elements j and j + `rotary` are a pair, those behind stay.
void rotate(const AttentionPass& pass, const float* vector, int64_t position, float* x);

#define DDTREE_VERSION(isa)                                                                                        \
    namespace isa {                                                                                                \
    void attend(const AttentionPass& pass, const Parallel& parallel);                                              \
    void compact(const CacheShape& shape, unsigned char* layer, int64_t start, const int32_t* keep, int64_t kept); \
    }
DDTREE_VERSION(plain)
DDTREE_VERSION(avx2)
DDTREE_VERSION(avx512)
DDTREE_VERSION(avx512_bf16)
#undef DDTREE_VERSION

}  // namespace ddtree::cpu
