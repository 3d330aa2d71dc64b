// The kernels' primitives on a CPU: the same source, compiled by a host compiler, runs with one fiber per CUDA thread.
//
// It checks index arithmetic, masks, split boundaries, fragment layouts as the PTX manual defines them, barriers
// and waits for copies. Fibers run in a shuffled order between barriers, shared memory begins as NaN, and an
// asynchronous copy lands at an unknown moment between its start and its wait, so that a missing barrier or wait shows.
// It cannot check the compiler's machine code, memory ordering between threads, or speed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "ddtree/attention.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define DDTREE_DYNAMIC_SHARED(name) unsigned char* name = ::ddtree::emulator::dynamic_shared()
#define DDTREE_UNROLL

struct dim3 {
    unsigned x, y, z;
    explicit dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

extern dim3 threadIdx;
extern dim3 blockIdx;

namespace ddtree {

namespace emulator {

extern int32_t multiprocessors;  // of the pretended GPU

unsigned char* dynamic_shared();
void block_barrier();
// Waits for the whole warp and returns the address of lane 0's value; lane l's is l * 64 bytes further.
const unsigned char* exchange(const void* value, size_t bytes);
void copy_start(void* to, const void* from, bool valid);
void copy_commit();
void copy_wait(int pending);
float from_fp16(uint16_t bits);
uint16_t to_fp16(float value);

// False when the threads of a block waited at different barriers.
bool run(void (*body)(const void*), const void* args, dim3 grid, dim3 block, size_t shared_bytes);

}  // namespace emulator

template <typename Args>
struct Launch {
    void (*kernel)(Args);
    const Args* args;
};

template <typename Args>
Status launch(void (*kernel)(Args), dim3 grid, dim3 block, size_t shared_bytes, Stream, const Args& args) {
    const Launch<Args> call{kernel, &args};
    const auto body = [](const void* raw) {
        const auto* call = static_cast<const Launch<Args>*>(raw);
        call->kernel(*call->args);
    };
    return emulator::run(body, &call, grid, block, shared_bytes) ? Status::ok : Status::launch_failed;
}

namespace device {

inline int32_t multiprocessors() { return emulator::multiprocessors; }
inline int lane() { return static_cast<int>(threadIdx.x % 32); }

inline void wait_and_trigger() {}
inline void sync_block() { emulator::block_barrier(); }
inline void sync_warp() { emulator::exchange(nullptr, 0); }

template <typename T>
T shuffle(T value, int from) {
    T result;
    std::memcpy(&result, emulator::exchange(&value, sizeof(T)) + from * 64, sizeof(T));
    return result;
}
template <typename T>
T shuffle_xor(T value, int lanes) {
    return shuffle(value, lane() ^ lanes);
}
inline uint32_t ballot(bool predicate) {
    const unsigned char* all = emulator::exchange(&predicate, sizeof(bool));
    uint32_t bits = 0;
    for (int l = 0; l < 32; ++l) {
        bits |= static_cast<uint32_t>(all[l * 64] != 0) << l;
    }
    return bits;
}
inline uint32_t warp_max(uint32_t value) {
    const unsigned char* all = emulator::exchange(&value, sizeof(value));
    uint32_t most = 0;
    for (int l = 0; l < 32; ++l) {
        uint32_t held;
        std::memcpy(&held, all + l * 64, sizeof(held));
        most = held > most ? held : most;
    }
    return most;
}
inline int count_bits(uint32_t bits) { return __builtin_popcount(bits); }
inline int first_bit(uint32_t bits) { return __builtin_ctz(bits); }

// Fibers run one at a time.
inline int32_t atomic_add(int32_t* at, int32_t value) {
    const int32_t before = *at;
    *at += value;
    return before;
}
inline uint32_t atomic_max(uint32_t* at, uint32_t value) {
    const uint32_t before = *at;
    *at = before < value ? value : before;
    return before;
}

inline float exp2_fast(float x) { return std::exp2(x); }
inline float product(float x, float y) { return x * y; }
inline float fused(float x, float y, float z) { return std::fma(x, y, z); }

inline void copy_async(void* shared, const void* global, bool valid) { emulator::copy_start(shared, global, valid); }
inline void copy_commit() { emulator::copy_commit(); }
template <int kPending>
void copy_wait() {
    emulator::copy_wait(kPending);
}

inline uint16_t half_at(const unsigned char* row, int column) {
    uint16_t bits;
    std::memcpy(&bits, row + 2 * column, 2);
    return bits;
}

inline void load_matrices(uint32_t (&r)[4], const void* shared) {
    const unsigned char* rows = emulator::exchange(&shared, sizeof(shared));
    for (int i = 0; i < 4; ++i) {
        const unsigned char* row;
        std::memcpy(&row, rows + (i * 8 + lane() / 4) * 64, sizeof(row));
        std::memcpy(&r[i], row + 4 * (lane() % 4), 4);
    }
}
inline void load_matrices_transposed(uint32_t (&r)[4], const void* shared) {
    const unsigned char* rows = emulator::exchange(&shared, sizeof(shared));
    for (int i = 0; i < 4; ++i) {
        uint32_t pair[2];
        for (int e = 0; e < 2; ++e) {
            const unsigned char* row;
            std::memcpy(&row, rows + (i * 8 + 2 * (lane() % 4) + e) * 64, sizeof(row));
            pair[e] = half_at(row, lane() / 4);
        }
        r[i] = pair[0] | pair[1] << 16;
    }
}

template <ElementType kType>
float widened(uint32_t bits) {
    if constexpr (kType == ElementType::bf16) {
        const uint32_t wide = bits << 16;
        float value;
        std::memcpy(&value, &wide, 4);
        return value;
    } else {
        return emulator::from_fp16(static_cast<uint16_t>(bits));
    }
}
template <ElementType kType>
uint32_t narrowed(float value) {
    if constexpr (kType == ElementType::bf16) {
        if (std::isnan(value)) {
            return 0x7fff;
        }
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
    } else {
        return emulator::to_fp16(value);
    }
}
template <ElementType kType>
uint32_t pack(float low, float high) {
    return narrowed<kType>(low) | narrowed<kType>(high) << 16;
}

template <ElementType kType>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    // Each lane widens what it holds, so that an element is converted once per product and not once per use.
    float mine[12];
    for (int i = 0; i < 4; ++i) {
        mine[2 * i] = widened<kType>(a[i] & 0xffff);
        mine[2 * i + 1] = widened<kType>(a[i] >> 16);
    }
    mine[8] = widened<kType>(b0 & 0xffff);
    mine[9] = widened<kType>(b0 >> 16);
    mine[10] = widened<kType>(b1 & 0xffff);
    mine[11] = widened<kType>(b1 >> 16);
    const unsigned char* all = emulator::exchange(mine, sizeof(mine));
    const auto held = [&](int l) { return reinterpret_cast<const float*>(all + l * 64); };
    const int g = lane() / 4;
    for (int e = 0; e < 4; ++e) {
        const int column = 2 * (lane() % 4) + e % 2;
        float sum[16];
        for (int k = 0; k < 16; ++k) {
            // Row g (e < 2) or g + 8 of a, column k; row k of b, column `column`.
            const float x = held(g * 4 + k % 8 / 2)[(k / 8 * 2 + e / 2) * 2 + k % 2];
            const float y = held(column * 4 + k % 8 / 2)[8 + k / 8 * 2 + k % 2];
            sum[k] = x * y;
        }
        // Pair by pair: hardware's order is its own, and in this one a term's place is seen in the result.
        for (int apart = 1; apart < 16; apart *= 2) {
            for (int k = 0; k < 16; k += 2 * apart) {
                sum[k] += sum[k + apart];
            }
        }
        c[e] += sum[0];
    }
}

}  // namespace device
}  // namespace ddtree
