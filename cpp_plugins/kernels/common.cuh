// Small helpers of the kernels and launchers.
#pragma once

#include "primitives.cuh"

namespace ddtree {

constexpr int kWarp = 32;
constexpr float kLog2E = 1.4426950408889634f;

struct alignas(16) Bytes16 {
    uint32_t word[4];
};
struct alignas(16) Float4 {
    float x[4];
};
struct alignas(8) Float2 {
    float x[2];
};

template <typename T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}
template <typename T>
__host__ __device__ constexpr T smaller(T a, T b) {
    return b < a ? b : a;
}
template <typename T>
__host__ __device__ constexpr T larger(T a, T b) {
    return a < b ? b : a;
}
// For any `value`; low <= high.
__host__ __device__ constexpr int32_t clamped(int32_t value, int32_t low, int32_t high) {
    return smaller(larger(value, low), high);
}

// Every lane gets the sum.
__device__ inline float warp_sum(float value) {
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
        value += device::shuffle_xor(value, lanes);
    }
    return value;
}

inline bool aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <typename... Pointers>
bool any_null(Pointers... pointers) {
    return (... || (pointers == nullptr));
}

}  // namespace ddtree
