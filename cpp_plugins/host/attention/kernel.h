// What the versions of kernel.inl and their caller share.
#pragma once

#include "ddtree/cpu_attention.h"
#include "ddtree/cpu_delta.h"
#include "ddtree/cpu_product.h"

namespace ddtree::cpu {

#define DDTREE_VERSION(isa)                                                                                        \
    namespace isa {                                                                                                \
    void attend(const AttentionPass& pass, const Parallel& parallel);                                              \
    void compact(const CacheShape& shape, unsigned char* layer, int64_t start, const int32_t* keep, int64_t kept); \
    void delta(const DeltaPass& pass, const Parallel& parallel);                                                   \
    void delta_commit(const DeltaShape& shape, float* state, const float* moves, const int32_t* rows, int64_t n);  \
    void multiply(const ProductPass& pass, const Parallel& parallel);                                              \
    }
DDTREE_VERSION(plain)
DDTREE_VERSION(avx2)
DDTREE_VERSION(avx512)
DDTREE_VERSION(avx512_vnni)
DDTREE_VERSION(avx512_bf16)
#undef DDTREE_VERSION

}  // namespace ddtree::cpu
