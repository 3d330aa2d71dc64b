// The few hardware operations the kernels are written in. The other implementation of the same names is
// emulator/primitives.h, which runs the kernels' own source on a CPU; keep the two in step.
#pragma once

#ifdef DDTREE_EMULATE
#include "../emulator/primitives.h"
#else

#include <cuda_runtime.h>

#include <cstdint>

#include "ddtree/attention.h"

#define DDTREE_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define DDTREE_UNROLL _Pragma("unroll")

namespace ddtree {

// Launches and reports this launch's own error, not one left behind by others. A block may ask for more dynamic shared
// memory than the 48 KB every device grants. From Hopper on a kernel may begin while the one before it ends: every
// kernel calls device::wait_and_trigger first.
template <typename Args>
Status launch(void (*kernel)(Args), dim3 grid, dim3 block, size_t shared_bytes, Stream stream, const Args& args) {
    if (shared_bytes > 48 * 1024 && cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                         static_cast<int>(shared_bytes)) != cudaSuccess) {
        return Status::launch_failed;
    }
    int device = 0, major = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) {
        return Status::launch_failed;
    }
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = major >= 9 ? 1 : 0;
    void* arguments[] = {const_cast<Args*>(&args)};
    const cudaError_t error = cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
    return error == cudaSuccess ? Status::ok : Status::launch_failed;
}

namespace device {

// Of the current device; 0 where CUDA does not say.
inline int32_t multiprocessors() {
    int device = 0, count = 0;
    const bool known = cudaGetDevice(&device) == cudaSuccess &&
                       cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
    return known ? count : 0;
}

// Waits until what the kernels before wrote can be read, and then lets the next one begin, which waits likewise. In
// this order and first in every kernel no more than two neighbours overlap, and when a kernel is done all before it
// are.
__device__ inline void wait_and_trigger() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline void sync_block() { __syncthreads(); }
__device__ inline void sync_warp() { __syncwarp(); }

template <typename T>
__device__ T shuffle_xor(T value, int lanes) {
    return __shfl_xor_sync(0xffffffffu, value, lanes);
}
template <typename T>
__device__ T shuffle(T value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}
__device__ inline uint32_t ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
__device__ inline uint32_t warp_max(uint32_t value) { return __reduce_max_sync(0xffffffffu, value); }
__device__ inline int count_bits(uint32_t bits) { return __popc(bits); }
__device__ inline int first_bit(uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }

// On shared memory; the value before.
__device__ inline int32_t atomic_add(int32_t* at, int32_t value) { return atomicAdd(at, value); }
__device__ inline uint32_t atomic_max(uint32_t* at, uint32_t value) { return atomicMax(at, value); }

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Never part of a fused operation that the compiler makes, and one.
__device__ inline float product(float x, float y) { return __fmul_rn(x, y); }
__device__ inline float fused(float x, float y, float z) { return __fmaf_rn(x, y, z); }

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory without registers; zeros when not `valid`, and then nothing is read.
__device__ inline void copy_async(void* shared, const void* global, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}
__device__ inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l names row l % 8 of matrix l / 8 and gets of matrix i, in r[i], the two
// elements (row l / 4, columns 2 (l % 4) and + 1), or of its transpose.
__device__ inline void load_matrices(uint32_t (&r)[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared))
                 : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared))
                 : "memory");
}

// c [16, 8] += a [16, 16] b [16, 8] across a warp. With g = lane / 4 and p = 2 (lane % 4):
// a[0..3] hold (g, p), (g + 8, p), (g, p + 8), (g + 8, p + 8), each with its right neighbour; b0, b1 hold column g,
// rows p, p + 1 and p + 8, p + 9; c holds (g, p), (g, p + 1), (g + 8, p), (g + 8, p + 1).
template <ElementType kType>
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kType == ElementType::bf16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// The 16-bit element in the lower half, as float32; the upper half is 0.
template <ElementType kType>
__device__ inline float widened(uint32_t bits) {
    float value;
    if constexpr (kType == ElementType::bf16) {
        value = __uint_as_float(bits << 16);
    } else {
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(bits)));
    }
    return value;
}

// Two rounded 16-bit elements, `low` in the lower half.
template <ElementType kType>
__device__ inline uint32_t pack(float low, float high) {
    uint32_t packed;
    if constexpr (kType == ElementType::bf16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
}

}  // namespace device
}  // namespace ddtree

#endif
