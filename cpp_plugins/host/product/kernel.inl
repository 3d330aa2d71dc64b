// The arithmetic of cpu_product.h for one instruction set: included behind delta/kernel.inl, whose vectors it uses.
#include "ddtree/cpu_product.h"

namespace ddtree::cpu::DDTREE_ISA {
namespace {

// Sums of a panel, in PARTS vectors; what a value of a row is kept as; how a step's products are added.
#if defined(__AVX512VNNI__)
using Value = int8_t;
using Sum = __m512i;
constexpr int PARTS = 1, MOST_ROWS = 8, TOGETHER = 2;  // a tile's rows and panels: its sums fit the registers
inline Sum spread(const Value* a) {
    int32_t word;
    std::memcpy(&word, a, sizeof word);
    return _mm512_set1_epi32(word);
}
inline Sum add(Sum sum, const uint8_t* w, Sum a) { return _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(w), a); }
inline void finish(const Sum* sums, int32_t* out) { _mm512_storeu_si512(out, sums[0]); }
#elif defined(__AVX2__)
// Products of two values in 16 bits each: a part has two sums of each output.
using Value = int16_t;
#if defined(__AVX512BW__)
using Sum = __m512i;
constexpr int PARTS = 2, MOST_ROWS = 6, TOGETHER = 2;
inline Sum spread(const Value* a) {
    int64_t word;
    std::memcpy(&word, a, sizeof word);
    return _mm512_set1_epi64(word);
}
inline Sum add(Sum sum, const uint8_t* w, Sum a) {
    const Sum wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)));
    return _mm512_add_epi32(sum, _mm512_madd_epi16(wide, a));
}
#else
using Sum = __m256i;
constexpr int PARTS = 4, MOST_ROWS = 3, TOGETHER = 1;
inline Sum spread(const Value* a) {
    int64_t word;
    std::memcpy(&word, a, sizeof word);
    return _mm256_set1_epi64x(word);
}
inline Sum add(Sum sum, const uint8_t* w, Sum a) {
    const Sum wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(wide, a));
}
#endif
inline void finish(const Sum* sums, int32_t* out) {
    int32_t both[2 * PANEL];
    std::memcpy(both, sums, sizeof both);
    for (int i = 0; i < PANEL; ++i) out[i] = both[2 * i] + both[2 * i + 1];
}
#else
using Value = int16_t;
struct Sum {
    int32_t of[PANEL];
};
constexpr int PARTS = 1, MOST_ROWS = 2, TOGETHER = 1;
inline const Value* spread(const Value* a) { return a; }
inline Sum add(Sum sum, const uint8_t* w, const Value* a) {
    for (int i = 0; i < PANEL; ++i) {
        for (int j = 0; j < STEP; ++j) sum.of[i] += a[j] * w[i * STEP + j];
    }
    return sum;
}
inline void finish(const Sum* sums, int32_t* out) { std::memcpy(out, sums, sizeof *sums); }
#endif
constexpr int PART_BYTES = PANEL * STEP / PARTS;

// A row's integers, its scale, and 128 times their sum, which is what the weights' 128 add.
struct Rounded {
    float scale;
    uint32_t excess;
};

Rounded round_row(const float* x, int64_t size, Value* out, int64_t padded) {
    float most = 0;
    int64_t i = 0;
    V high{}, none{};  // 0, and NaN where a value is not finite, which comparisons forget: the scale is then NaN, too
    for (; i + LANES <= size; i += LANES) {
        high = larger(high, larger(load(x + i), -load(x + i)));
        none += load(x + i) * 0;
    }
    most = highest(high);
    for (int64_t j = i; j < size; ++j) {
        most = std::max(most, std::abs(x[j]));
        none[0] += x[j] * 0;
    }
    for (int lane = 0; lane < LANES; ++lane) most += none[lane];
    const float by = most > 0 ? 127 / most : 0;
    constexpr float SHIFT = 12582912.0f;  // 1.5 · 2^23: the nearest integer is in the last bits
    uint32_t shift;
    std::memcpy(&shift, &SHIFT, sizeof shift);
    typedef Value Values __attribute__((vector_size(LANES * sizeof(Value)), aligned(sizeof(Value)), may_alias));
    U sum{};
    i = 0;
    for (; i + LANES <= size; i += LANES) {
        const U values = (U)(load(x + i) * by + SHIFT) - shift;
        sum += values;
        *reinterpret_cast<Values*>(out + i) = __builtin_convertvector(values, Values);
    }
    uint32_t total = 0;
    for (int lane = 0; lane < LANES; ++lane) total += sum[lane];
    for (; i < size; ++i) {
        const float shifted = x[i] * by + SHIFT;
        uint32_t value;
        std::memcpy(&value, &shifted, sizeof value);
        total += value - shift;
        out[i] = static_cast<Value>(value - shift);
    }
    std::fill(out + size, out + padded, Value{0});
    return {most / 127, 128 * total};
}

// silu(gate) · up of a row, and butterflies between its parts.
void gate(const ProductPass& p, const float* row, float* x) {
    const int64_t size = p.inputs;
    const float* up = row + size;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(x + i, silu(load(row + i)) * load(up + i));
    for (; i < size; ++i) x[i] = silu(all(row[i]))[0] * up[i];
    for (int64_t run = size / p.parts; run < size; run *= 2) {
        for (i = 0; i < size; i += 2 * run) {
            float *first = x + i, *second = first + run;
            int64_t j = 0;
            for (; j + LANES <= run; j += LANES) {
                const V a = load(first + j), b = load(second + j);
                store(first + j, a + b);
                store(second + j, a - b);
            }
            for (; j < run; ++j) {
                const float a = first[j], b = second[j];
                first[j] = a + b;
                second[j] = a - b;
            }
        }
    }
}

// Sums of N rows with W panels. K: every K-th step has sums of its own, so that the next need not wait for it.
template <int N, int W, int K>
void tile(const uint8_t* const* panels, int64_t steps, const Value* const* rows, int32_t (*out)[W][PANEL]) {
    Sum sums[K][N][W][PARTS] = {};
    const auto step = [&](int64_t i, int k) {
        for (int n = 0; n < N; ++n) {
            const auto a = spread(rows[n] + i * STEP);
            for (int w = 0; w < W; ++w) {
                for (int part = 0; part < PARTS; ++part) {
                    Sum& sum = sums[k][n][w][part];
                    sum = add(sum, panels[w] + i * PANEL * STEP + part * PART_BYTES, a);
                }
            }
        }
    };
    int64_t i = 0;
    for (; i + K <= steps; i += K) {
        for (int k = 0; k < K; ++k) step(i + k, k);
    }
    for (; i < steps; ++i) step(i, 0);
    for (int n = 0; n < N; ++n) {
        for (int w = 0; w < W; ++w) {
            finish(sums[0][n][w], out[n][w]);
            for (int k = 1; k < K; ++k) {
                int32_t more[PANEL];
                finish(sums[k][n][w], more);
                for (int j = 0; j < PANEL; ++j) out[n][w][j] += more[j];
            }
        }
    }
}

struct Product {
    const ProductPass& pass;
    const Value* values;     // [rows, steps · STEP]
    const Rounded* rounded;  // [rows]
    float* more;             // [rows, fine]

    void write(int64_t row, int64_t panel, const int32_t* sums) const {
        const ProductPass& p = pass;
        const int64_t first = panel * PANEL, end = std::min(first + PANEL, p.outputs + p.fine);
        float scale[PANEL] = {}, found[PANEL];
        if (first + PANEL == end) {  // a length that is known
            std::copy(p.scale + first, p.scale + first + PANEL, scale);
        } else {
            std::copy(p.scale + first, p.scale + end, scale);
        }
        for (int i = 0; i < PANEL; ++i) {
            const auto sum = static_cast<int32_t>(static_cast<uint32_t>(sums[i]) - rounded[row].excess);
            found[i] = static_cast<float>(sum) * (rounded[row].scale * scale[i]);
        }
        const int64_t own = std::clamp<int64_t>(p.outputs - first, 0, end - first);
        if (own == PANEL) {
            std::copy(found, found + PANEL, p.out + row * p.outputs + first);
        } else {
            std::copy(found, found + own, p.out + row * p.outputs + first);
            std::copy(found + own, found + (end - first), more + row * p.fine + first + own - p.outputs);
        }
    }

    template <int N, int W, int K>
    void tile_of(int64_t row, int64_t panel) const {
        const uint8_t* panels[W];
        const Value* rows[N];
        int32_t sums[N][W][PANEL];
        const int64_t steps = pass.steps();
        for (int w = 0; w < W; ++w) panels[w] = pass.weight + (panel + w) * steps * PANEL * STEP;
        for (int n = 0; n < N; ++n) rows[n] = values + (row + n) * steps * STEP;
        tile<N, W, K>(panels, steps, rows, sums);
        for (int n = 0; n < N; ++n) {
            for (int w = 0; w < W; ++w) write(row + n, panel + w, sums[n][w]);
        }
    }

    // Some panels of all rows, in tiles of about as many rows each: the weights stay in a cache for the next tile.
    void panels(int64_t first, int64_t end) const {
        const int64_t tiles = (pass.rows + MOST_ROWS - 1) / MOST_ROWS;
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t from = pass.rows * t / tiles, count = pass.rows * (t + 1) / tiles - from;
            int64_t panel = first;
            // A single row reads its weights one panel after another.
            for (; count > 1 && panel + TOGETHER <= end; panel += TOGETHER) {
                rows_of<TOGETHER, MOST_ROWS>(count, from, panel);
            }
            for (; panel < end; ++panel) rows_of<1, MOST_ROWS>(count, from, panel);
        }
    }
    template <int W, int N>
    void rows_of(int64_t count, int64_t from, int64_t first) const {
        if constexpr (N > 1) {
            if (count < N) return rows_of<W, N - 1>(count, from, first);
        }
        tile_of<N, W, N == 1 ? 4 / W : 1>(from, first);
    }
};

}  // namespace

void multiply(const ProductPass& p, const Parallel& parallel) {
    const int64_t padded = p.steps() * STEP, panels = p.panels();
    struct Memory {
        std::vector<Value> values;
        std::vector<Rounded> rounded;
        std::vector<float> more;
    };
    thread_local Memory kept;
    Memory& memory = kept;  // of this thread in the tasks of all
    memory.values.resize(p.rows * padded);
    memory.rounded.resize(p.rows);
    memory.more.resize(p.rows * p.fine);
    const auto round = [&](size_t row) {
        const float* x = p.x + row * p.inputs * (p.gated() ? 2 : 1);
        if (p.gated()) {
            thread_local std::vector<float> gated;
            gated.resize(p.inputs);
            gate(p, x, gated.data());
            x = gated.data();
        }
        memory.rounded[row] = round_row(x, p.inputs, memory.values.data() + row * padded, padded);
    };
    if (p.rows > 1 && p.rows * p.inputs * (p.gated() ? 8 : 1) > 32768) {
        parallel(p.rows, round);
    } else {
        for (int64_t row = 0; row < p.rows; ++row) round(row);
    }
    const Product product{p, memory.values.data(), memory.rounded.data(), memory.more.data()};
    // Where the rows fit the first cache they stay there, else the weights of a unit in the second.
    const int64_t unit = TOGETHER * (p.rows * padded < 20000 ? 1 : std::clamp<int64_t>(panels / 48, 1, 8));
    parallel((panels + unit - 1) / unit, [&](size_t i) {
        const auto first = static_cast<int64_t>(i) * unit;
        product.panels(first, std::min(panels, first + unit));
    });
    for (int64_t row = 0; row < p.rows && p.fine; ++row) {
        float* out = p.out + (row + 1) * p.outputs - p.fine;
        for (int64_t i = 0; i < p.fine; ++i) out[i] += memory.more[row * p.fine + i];
    }
}

}  // namespace ddtree::cpu::DDTREE_ISA
