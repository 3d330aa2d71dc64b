// The choice of an instruction set, and what does not depend on it.
#include <cstdlib>
#include <cstring>

#include "attention/kernel.h"

namespace ddtree::cpu {

namespace {

struct Version {
    const char* name;
    void (*attend)(const AttentionPass&, const Parallel&);
    void (*compact)(const CacheShape&, unsigned char*, int64_t, const int32_t*, int64_t);
    void (*delta)(const DeltaPass&, const Parallel&);
    void (*delta_commit)(const DeltaShape&, float*, const float*, const int32_t*, int64_t);
    void (*multiply)(const ProductPass&, const Parallel&);
};
#define DDTREE_FUNCTIONS(isa) isa::attend, isa::compact, isa::delta, isa::delta_commit, isa::multiply

Version chosen() {
    const Version plain{"plain", DDTREE_FUNCTIONS(plain)};
#ifdef DDTREE_X86
    const char* limit = std::getenv("DDTREE_CPU_ISA");  // for tests: the version to take
    const auto allowed = [&](const char* name) { return limit == nullptr || std::strcmp(limit, name) == 0; };
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool bytes = wide && __builtin_cpu_supports("avx512vnni");
    // Intel's dot products of bfloat16 take longer than the two multiply-adds that each stands for.
    const bool dots = __builtin_cpu_supports("avx512bf16") && (__builtin_cpu_is("amd") || limit != nullptr);
    if (bytes && dots && allowed("avx512-bf16")) {
        return {"avx512-bf16", DDTREE_FUNCTIONS(avx512_bf16)};
    }
    if (bytes && allowed("avx512-vnni")) {
        return {"avx512-vnni", DDTREE_FUNCTIONS(avx512_vnni)};
    }
    if (wide && allowed("avx512")) {
        return {"avx512", DDTREE_FUNCTIONS(avx512)};
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && allowed("avx2")) {
        return {"avx2", DDTREE_FUNCTIONS(avx2)};
    }
#endif
    return plain;
}

const Version& version() {
    static const Version the = chosen();
    return the;
}

}  // namespace

void attend(const AttentionPass& pass, const Parallel& parallel) { version().attend(pass, parallel); }

void compact(const CacheShape& shape, unsigned char* slot, int64_t start, const int32_t* keep, int64_t kept) {
    version().compact(shape, slot, start, keep, kept);
}

void delta(const DeltaPass& pass, const Parallel& parallel) { version().delta(pass, parallel); }

void delta_commit(const DeltaShape& shape, float* state, const float* moves, const int32_t* rows, int64_t count) {
    version().delta_commit(shape, state, moves, rows, count);
}

void multiply(const ProductPass& pass, const Parallel& parallel) { version().multiply(pass, parallel); }

const char* attention_isa() { return version().name; }

}  // namespace ddtree::cpu
