// Norms, rotary embedding and SwiGLU between the matrix products of a layer. All of them are bound by memory, and in a
// decoding round by the number of launches.

#include "common.cuh"
#include "ddtree/pointwise.h"

namespace ddtree {

namespace {

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / kWarp;
constexpr int kHeadWarps = 4;
constexpr int kPacked = 8;  // elements in 16 bytes

template <ElementType kType>
__device__ void unpack(const Bytes16& bytes, float (&x)[kPacked]) {
    DDTREE_UNROLL
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = device::widened<kType>(bytes.word[i] & 0xffffu);
        x[2 * i + 1] = device::widened<kType>(bytes.word[i] >> 16);
    }
}
template <ElementType kType>
__device__ Bytes16 packed(const float (&x)[kPacked]) {
    Bytes16 bytes;
    DDTREE_UNROLL
    for (int i = 0; i < 4; ++i) {
        bytes.word[i] = device::pack<kType>(x[2 * i], x[2 * i + 1]);
    }
    return bytes;
}

// One block per row. Each thread handles the same 16-byte pieces twice, so that it reads only what it wrote itself.
template <ElementType kType>
__global__ void __launch_bounds__(kRowThreads) add_norm(const AddNorm a) {
    device::wait_and_trigger();
    DDTREE_DYNAMIC_SHARED(shared);
    auto* sums = reinterpret_cast<float*>(shared);  // [kRowWarps]
    const int pieces = a.width / kPacked;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * pieces;
    const auto* x = static_cast<const Bytes16*>(a.x) + first;
    const auto* update = a.update != nullptr ? static_cast<const Bytes16*>(a.update) + first : nullptr;
    auto* sum = static_cast<Bytes16*>(a.sum) + first;
    const int thread = static_cast<int>(threadIdx.x);

    float squares = 0.0f;
    for (int i = thread; i < pieces; i += kRowThreads) {
        float v[kPacked];
        unpack<kType>(x[i], v);
        if (update != nullptr) {
            float w[kPacked];
            unpack<kType>(update[i], w);
            DDTREE_UNROLL
            for (int e = 0; e < kPacked; ++e) {
                v[e] += w[e];
            }
            const Bytes16 rounded = packed<kType>(v);
            sum[i] = rounded;
            unpack<kType>(rounded, v);
        }
        DDTREE_UNROLL
        for (int e = 0; e < kPacked; ++e) {
            squares += v[e] * v[e];
        }
    }
    squares = warp_sum(squares);
    if (thread % kWarp == 0) {
        sums[thread / kWarp] = squares;
    }
    device::sync_block();
    float total = 0.0f;
    for (int i = 0; i < kRowWarps; ++i) {
        total += sums[i];
    }
    const float scale = 1.0f / sqrtf(total / static_cast<float>(a.width) + a.epsilon);

    const Bytes16* from = update != nullptr ? sum : x;
    const auto* weight = static_cast<const Bytes16*>(a.weight);
    auto* normed = static_cast<Bytes16*>(a.normed) + first;
    for (int i = thread; i < pieces; i += kRowThreads) {
        float v[kPacked], w[kPacked];
        unpack<kType>(from[i], v);
        unpack<kType>(weight[i], w);
        DDTREE_UNROLL
        for (int e = 0; e < kPacked; ++e) {
            v[e] *= scale * w[e];
        }
        normed[i] = packed<kType>(v);
    }
}

// One warp per head of a row. A lane holds two neighbours of the first half and the two they are rotated with.
template <ElementType kType, int kHeadDim>
__global__ void __launch_bounds__(kWarp* kHeadWarps) split(const SplitQkv a) {
    device::wait_and_trigger();
    constexpr int kHalf = kHeadDim / 2;
    constexpr int kPairs = (kHalf / 2 + kWarp - 1) / kWarp;  // of neighbours, in each half, of one lane
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int head = static_cast<int>(blockIdx.x) * kHeadWarps + static_cast<int>(threadIdx.x) / kWarp;
    const int heads = a.q_heads + 2 * a.kv_heads;
    if (head >= heads) {
        return;
    }
    const int64_t row = blockIdx.y;
    const auto* from = static_cast<const uint32_t*>(a.qkv) + (row * heads + head) * kHalf;
    const bool is_q = head < a.q_heads, is_v = head >= a.q_heads + a.kv_heads;
    const int of = is_q ? head : is_v ? head - a.q_heads - a.kv_heads : head - a.q_heads;
    void* const matrix = is_q ? a.q : is_v ? a.v : a.k;
    auto* to = static_cast<uint32_t*>(matrix) + (row * (is_q ? a.q_heads : a.kv_heads) + of) * kHalf;

    float low[2 * kPairs] = {}, high[2 * kPairs] = {};
    float squares = 0.0f;
    DDTREE_UNROLL
    for (int p = 0; p < kPairs; ++p) {
        const int word = lane + p * kWarp;
        if (word < kHalf / 2) {
            const uint32_t words[2] = {from[word], from[word + kHalf / 2]};
            if (is_v) {
                to[word] = words[0];
                to[word + kHalf / 2] = words[1];
            }
            DDTREE_UNROLL
            for (int e = 0; e < 2; ++e) {
                low[2 * p + e] = device::widened<kType>(words[0] >> (16 * e) & 0xffffu);
                high[2 * p + e] = device::widened<kType>(words[1] >> (16 * e) & 0xffffu);
                squares += low[2 * p + e] * low[2 * p + e] + high[2 * p + e] * high[2 * p + e];
            }
        }
    }
    if (is_v) {
        return;
    }
    const float scale = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(kHeadDim) + a.epsilon);
    const int position = clamped(a.positions[row], 0, a.table_rows - 1);
    const float* cosines = a.tables + static_cast<int64_t>(position) * kHeadDim;
    const float* sines = cosines + static_cast<int64_t>(a.table_rows) * kHeadDim + kHalf;
    const auto* norm = static_cast<const uint32_t*>(is_q ? a.q_norm : a.k_norm);
    DDTREE_UNROLL
    for (int p = 0; p < kPairs; ++p) {
        const int word = lane + p * kWarp;
        if (word >= kHalf / 2) {
            continue;
        }
        const uint32_t weights[2] = {norm[word], norm[word + kHalf / 2]};
        float turned[2][2];
        DDTREE_UNROLL
        for (int e = 0; e < 2; ++e) {
            const float x = low[2 * p + e] * scale * device::widened<kType>(weights[0] >> (16 * e) & 0xffffu);
            const float y = high[2 * p + e] * scale * device::widened<kType>(weights[1] >> (16 * e) & 0xffffu);
            const float cosine = cosines[2 * word + e], sine = sines[2 * word + e];
            turned[0][e] = x * cosine - y * sine;
            turned[1][e] = y * cosine + x * sine;
        }
        to[word] = device::pack<kType>(turned[0][0], turned[0][1]);
        to[word + kHalf / 2] = device::pack<kType>(turned[1][0], turned[1][1]);
    }
}

template <ElementType kType>
__global__ void __launch_bounds__(kRowThreads) gate(const SwiGlu a) {
    device::wait_and_trigger();
    const int pieces = a.inner / kPacked;
    const int piece = static_cast<int>(blockIdx.x) * kRowThreads + static_cast<int>(threadIdx.x);
    if (piece >= pieces) {
        return;
    }
    const int64_t row = blockIdx.y;
    const auto* gates = static_cast<const Bytes16*>(a.gate_up) + 2 * row * pieces + piece;
    float g[kPacked], u[kPacked];
    unpack<kType>(gates[0], g);
    unpack<kType>(gates[pieces], u);
    DDTREE_UNROLL
    for (int e = 0; e < kPacked; ++e) {
        u[e] *= g[e] / (1.0f + device::exp2_fast(-g[e] * kLog2E));
    }
    static_cast<Bytes16*>(a.out)[row * pieces + piece] = packed<kType>(u);
}

bool known(ElementType type) { return type == ElementType::bf16 || type == ElementType::fp16; }

template <typename... Pointers>
bool all_aligned16(Pointers... pointers) {
    return (... && aligned16(pointers));
}

template <int kHeadDim>
Status launch_split(const SplitQkv& call, Stream stream) {
    const int heads = call.q_heads + 2 * call.kv_heads;
    const dim3 grid(static_cast<unsigned>(ceil_div(heads, kHeadWarps)), static_cast<unsigned>(call.rows));
    const dim3 block(kWarp * kHeadWarps);
    return call.type == ElementType::bf16 ? launch(split<ElementType::bf16, kHeadDim>, grid, block, 0, stream, call)
                                          : launch(split<ElementType::fp16, kHeadDim>, grid, block, 0, stream, call);
}

}  // namespace

Status add_rms_norm(const AddNorm& call, Stream stream) {
    if (call.rows < 0 || call.width < kPacked || call.width % kPacked != 0) {
        return Status::bad_shape;
    }
    if (!known(call.type)) {
        return Status::unsupported;
    }
    if (call.rows == 0) {
        return Status::ok;
    }
    if (any_null(call.x, call.weight, call.normed) || (call.update != nullptr && call.sum == nullptr)) {
        return Status::null_pointer;
    }
    if (!all_aligned16(call.x, call.update, call.weight, call.sum, call.normed)) {
        return Status::misaligned;
    }
    const dim3 grid(static_cast<unsigned>(call.rows));
    const size_t shared = kRowWarps * sizeof(float);
    return call.type == ElementType::bf16
               ? launch(add_norm<ElementType::bf16>, grid, dim3(kRowThreads), shared, stream, call)
               : launch(add_norm<ElementType::fp16>, grid, dim3(kRowThreads), shared, stream, call);
}

Status split_qkv(const SplitQkv& call, Stream stream) {
    if (call.rows < 0 || call.rows > 65535 || call.q_heads < 1 || call.kv_heads < 1 || call.table_rows < 1) {
        return Status::bad_shape;
    }
    if (!known(call.type) || (call.head_dim != 64 && call.head_dim != 128)) {
        return Status::unsupported;
    }
    if (call.rows == 0) {
        return Status::ok;
    }
    if (any_null(call.qkv, call.q_norm, call.k_norm, call.tables, call.positions, call.q, call.k, call.v)) {
        return Status::null_pointer;
    }
    if (!all_aligned16(call.qkv, call.q_norm, call.k_norm, call.q, call.k, call.v)) {
        return Status::misaligned;
    }
    return call.head_dim == 64 ? launch_split<64>(call, stream) : launch_split<128>(call, stream);
}

Status swiglu(const SwiGlu& call, Stream stream) {
    if (call.rows < 0 || call.rows > 65535 || call.inner < kPacked || call.inner % kPacked != 0) {
        return Status::bad_shape;
    }
    if (!known(call.type)) {
        return Status::unsupported;
    }
    if (call.rows == 0) {
        return Status::ok;
    }
    if (any_null(call.gate_up, call.out)) {
        return Status::null_pointer;
    }
    if (!all_aligned16(call.gate_up, call.out)) {
        return Status::misaligned;
    }
    const dim3 grid(static_cast<unsigned>(ceil_div(call.inner / kPacked, kRowThreads)),
                    static_cast<unsigned>(call.rows));
    return call.type == ElementType::bf16 ? launch(gate<ElementType::bf16>, grid, dim3(kRowThreads), 0, stream, call)
                                          : launch(gate<ElementType::fp16>, grid, dim3(kRowThreads), 0, stream, call);
}

}  // namespace ddtree
