// The arithmetic of cpu_attention.h for one instruction set: included with DDTREE_ISA, the name of its namespace. All
// of it is written in vectors of LANES floats; compiled without contraction, so that every fused multiply-add is one
// that is written here.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "attention/kernel.h"

namespace ddtree::cpu::DDTREE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int VECTORS = LANES == 16 ? 4 : 2;  // accumulators of a row: 4 rows of them fit the registers
constexpr int ROWS = 4;
constexpr size_t ENOUGH = 8;  // pieces of work that keep threads busy
constexpr float NONE = -std::numeric_limits<float>::infinity();

typedef float V __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t U __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

inline V load(const void* p) { return *static_cast<const V*>(p); }
inline U load_words(const void* p) { return *static_cast<const U*>(p); }
inline void store(void* p, V x) { *static_cast<V*>(p) = x; }
inline V all(float x) { return V{} + x; }

inline V fma(V a, V b, V c) {
#if defined(__AVX512F__)
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

inline V larger(V a, V b) { return a > b ? a : b; }

// Lanes are joined in halves: the same order for every row. In registers, since it is done for every row and unit.
template <class Join>
inline float joined(V x, Join join) {
#if defined(__AVX512F__)
    const __m512 z = (__m512)x;
    const __m256 y = join(_mm512_castps512_ps256(z), _mm512_extractf32x8_ps(z, 1));
#elif defined(__AVX2__)
    const __m256 y = (__m256)x;
#endif
#if defined(__AVX2__)
    __m128 w = join(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    w = join(w, _mm_movehl_ps(w, w));
    return join(w, _mm_movehdup_ps(w))[0];
#else
    const float a = join(x[0], x[2]), b = join(x[1], x[3]);
    return join(a, b);
#endif
}
inline float highest(V x) {
    return joined(x, [](auto a, auto b) { return a > b ? a : b; });
}
inline float total(V x) {
    return joined(x, [](auto a, auto b) { return a + b; });
}

// e^x for x <= 0, 0 below −87: a polynomial of 2^f by the nearest integer, within two units of the last place.
inline V exponential(V x) {
    const V y = larger(x, all(-87.5f)) * 1.44269504088896341f;
    const V shifted = y + 12582912.0f;  // 1.5 · 2^23: the integer is in the last bits
    const V f = y - (shifted - 12582912.0f);
    V r = fma(all(1.5316377e-4f), f, all(1.3400483e-3f));
    r = fma(r, f, all(9.6180300e-3f));
    r = fma(r, f, all(5.5503264e-2f));
    r = fma(r, f, all(2.4022652e-1f));
    r = fma(r, f, all(6.9314718e-1f));
    r = fma(r, f, all(1.0f));
    const V power = (V)(((I)shifted << 23) + (I)all(1.0f));
    return x < all(-87.0f) ? V{} : r * power;
}
inline float exponential(float x) { return exponential(all(x))[0]; }

// x [D] is a head's vector rotated to a position: elements j and j + `rotary` are a pair, those behind stay.
inline void rotate(const AttentionPass& pass, const float* vector, int64_t position, float* __restrict x) {
    const int64_t half = pass.rotary;
    const float *cos = pass.cos + position * half, *sin = pass.sin + position * half;
    for (int64_t j = 0; j < half; ++j) {
        const float a = vector[j], b = vector[j + half];
        x[j] = a * cos[j] - b * sin[j];
        x[j + half] = b * cos[j] + a * sin[j];
    }
    for (int64_t j = 2 * half; j < pass.cache.head_dim; ++j) x[j] = vector[j];
}

// bfloat16 in words: two elements, the even one in the lower half. Rounded to nearest even.
inline uint32_t rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// How a cache's elements are stored, read and multiplied. A step is a row of D (float) or a pair of them (bfloat16);
// a factor is what a step is multiplied by.
struct Float {
    static constexpr int PAIR = 1;
    using Word = float;
    using Factor = float;
    static V add(V sum, V a, V b) { return fma(a, b, sum); }
    static V read(const Word* p) { return load(p); }
    static V spread(Factor x) { return all(x); }
    static void pack(const float* x, int64_t count, Word* out) { std::copy(x, x + count, out); }
    static void factors(const float* x, int64_t count, Factor* out) { std::copy(x, x + count, out); }
};
struct Half {
    static constexpr int PAIR = 2;
    using Word = uint32_t;
    static U read(const Word* p) { return load_words(p); }
    static void pack(const float* x, int64_t count, Word* out) {
        for (int64_t i = 0; i < count / 2; ++i) out[i] = rounded(x[2 * i]) | rounded(x[2 * i + 1]) << 16;
        if (count % 2) out[count / 2] = rounded(x[count - 1]);
    }
#if defined(__AVX512BF16__)
    using Factor = Word;
    static V add(V sum, U a, U b) { return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
    static U spread(Factor x) { return U{} + x; }
    static void factors(const float* x, int64_t count, Factor* out) { pack(x, count, out); }
#else
    struct Factor {
        uint32_t bits[2];  // of floats
    };
    struct Both {
        V even, odd;
    };
    static V add(V sum, U a, const Both& b) { return fma((V)(a & 0xffff0000u), b.odd, fma((V)(a << 16), b.even, sum)); }
    static Both spread(const Factor& x) { return {(V)(U{} + x.bits[0]), (V)(U{} + x.bits[1])}; }
    static void factors(const float* x, int64_t count, Factor* out) {
        auto* bits = reinterpret_cast<uint32_t*>(out);
        for (int64_t i = 0; i < count; ++i) bits[i] = rounded(x[i]) << 16;
        if (count % 2) bits[count] = 0;
    }
#endif
};

// A head's part of a slot's cache.
template <class E>
struct Head {
    typename E::Word* keys;
    typename E::Word* values;
    int64_t steps;   // words of a key's column: ceil(D / PAIR)
    int64_t padded;  // words of a values' row

    Head(const CacheShape& shape, unsigned char* slot, int64_t head)
        : keys(reinterpret_cast<typename E::Word*>(slot + head * shape.head_bytes())),
          values(reinterpret_cast<typename E::Word*>(reinterpret_cast<unsigned char*>(keys) + shape.key_bytes())),
          steps((shape.head_dim + E::PAIR - 1) / E::PAIR),
          padded(shape.padded()) {}

    typename E::Word* unit(int64_t index) const { return keys + index * steps * UNIT; }

    void put_key(int64_t row, const typename E::Word* packed) const {
        typename E::Word* column = unit(row / UNIT) + row % UNIT;
        for (int64_t i = 0; i < steps; ++i) column[i * UNIT] = packed[i];
    }
    void put_value(int64_t row, const float* x, int64_t size) const {
        if constexpr (E::PAIR == 1) {
            std::copy(x, x + size, values + row * padded);
        } else {
            auto* halves = reinterpret_cast<uint16_t*>(values + row / 2 * padded) + row % 2;
            for (int64_t i = 0; i < size; ++i) halves[2 * i] = static_cast<uint16_t>(rounded(x[i]));
        }
    }
    void move(int64_t from, int64_t to) const {
        typename E::Word *a = unit(from / UNIT) + from % UNIT, *b = unit(to / UNIT) + to % UNIT;
        for (int64_t i = 0; i < steps; ++i) b[i * UNIT] = a[i * UNIT];
        if constexpr (E::PAIR == 1) {
            std::copy(values + from * padded, values + (from + 1) * padded, values + to * padded);
        } else {
            auto* source = reinterpret_cast<uint16_t*>(values + from / 2 * padded) + from % 2;
            auto* target = reinterpret_cast<uint16_t*>(values + to / 2 * padded) + to % 2;
            for (int64_t i = 0; i < padded; ++i) target[2 * i] = source[2 * i];
        }
    }
};

// Scores [rows, UNIT] of up to ROWS queries with the keys of a unit: each a sum over the elements in their order.
template <class E, int N>
void score(const typename E::Word* unit, int64_t steps, const typename E::Factor* const* query, float* const* out) {
    for (int64_t lane = 0; lane < UNIT; lane += LANES * VECTORS) {
        V sum[N][VECTORS] = {};
        for (int64_t i = 0; i < steps; ++i) {
            const typename E::Word* k = unit + i * UNIT + lane;
            for (int n = 0; n < N; ++n) {
                const auto q = E::spread(query[n][i]);
                for (int v = 0; v < VECTORS; ++v) sum[n][v] = E::add(sum[n][v], E::read(k + v * LANES), q);
            }
        }
        for (int n = 0; n < N; ++n) {
            for (int v = 0; v < VECTORS; ++v) store(out[n] + lane + v * LANES, sum[n][v]);
        }
    }
}

// Adds to o [rows][padded] the values of steps 0 … count − 1 times their shares: each element's sum in the steps'
// order.
template <class E, int N, int VS, class At>
void weigh_columns(const At& at, int64_t count, const typename E::Factor* const* share, float* const* o,
                   int64_t column) {
    V sum[N][VS];
    for (int n = 0; n < N; ++n) {
        for (int v = 0; v < VS; ++v) sum[n][v] = load(o[n] + column + v * LANES);
    }
    for (int64_t i = 0; i < count; ++i) {
        for (int v = 0; v < VS; ++v) {
            const auto x = at(i, column + v * LANES);
            for (int n = 0; n < N; ++n) sum[n][v] = E::add(sum[n][v], x, E::spread(share[n][i]));
        }
    }
    for (int n = 0; n < N; ++n) {
        for (int v = 0; v < VS; ++v) store(o[n] + column + v * LANES, sum[n][v]);
    }
}
template <class E, int N, class At>
void weigh(const At& at, int64_t count, const typename E::Factor* const* share, float* const* o, int64_t padded) {
    int64_t column = 0;
    for (; column + VECTORS * LANES <= padded; column += VECTORS * LANES) {
        weigh_columns<E, N, VECTORS>(at, count, share, o, column);
    }
    for (; column < padded; column += LANES) weigh_columns<E, N, 1>(at, count, share, o, column);
}

// Calls one of the versions for 1 … ROWS rows.
template <class F>
void with_rows(int rows, const F& call) {
    switch (rows) {
        case 1:
            call(std::integral_constant<int, 1>());
            break;
        case 2:
            call(std::integral_constant<int, 2>());
            break;
        case 3:
            call(std::integral_constant<int, 3>());
            break;
        default:
            call(std::integral_constant<int, 4>());
    }
}

// A slot's rows and where they begin in the arrays.
struct Placed : SlotRows {
    int64_t first_context, first_query;  // rows of the arrays of keys and queries
    int64_t first_out;
    const int32_t* parents;       // of its nodes
    std::vector<int32_t> depths;  // of its nodes; empty where they follow each other

    // The position of its node `node`.
    int64_t position(int64_t node) const { return past + contexts + (depths.empty() ? node : depths[node]); }
};

// A row of a task: a query head of a node.
struct Row {
    int64_t first, end;  // positions it sees
    int64_t own;         // positions from here on are those of its branch: they lie where its ancestors' rows lie
    int64_t node;
};

// The state of a softmax begun at a part: the largest score, the sum of shares, and their values.
struct State {
    float highest = NONE, sum = 0;
};

// Online softmax of a unit: scores [UNIT] by position become shares, hidden ones 0. Returns what o is multiplied by.
inline float soften(float* scores, int64_t from, int64_t end, State& state) {
    for (int64_t i = 0; i < std::max<int64_t>(from, 0); ++i) scores[i] = NONE;
    for (int64_t i = std::max<int64_t>(end, 0); i < UNIT; ++i) scores[i] = NONE;
    V most = load(scores);
    for (int64_t i = LANES; i < UNIT; i += LANES) most = larger(most, load(scores + i));
    const float now = std::max(state.highest, highest(most));
    const float shrink = exponential(state.highest - now);
    V sum{};
    for (int64_t i = 0; i < UNIT; i += LANES) {
        const V e = exponential(load(scores + i) - now);
        store(scores + i, e);
        sum += e;
    }
    state.sum = state.sum * shrink + total(sum);
    state.highest = now;
    return shrink;
}

template <class E>
struct Task {
    const AttentionPass& pass;
    const Placed& slot;
    const Head<E> head;
    struct Memory {
        std::vector<Row> row;
        std::vector<typename E::Factor> query;  // [rows, steps]
        std::vector<float> o;                   // [rows, padded]
        std::vector<State> state;
        std::vector<float> x;  // [D]
    };
    // Its thread's: a pass has hundreds of tasks, and an allocator that is asked for all of it takes a twentieth.
    static Memory& memory() {
        thread_local Memory kept;
        return kept;
    }
    std::vector<Row>& row = memory().row;
    std::vector<typename E::Factor>& query = memory().query;
    std::vector<float>& o = memory().o;
    std::vector<State>& state = memory().state;

    // Queries from … to − 1 of a slot, with the query heads of a key head.
    Task(const AttentionPass& p, const Placed& s, int64_t kv_head, int64_t from, int64_t to)
        : pass(p), slot(s), head(p.cache, p.storage + s.slot * p.slot_stride, kv_head) {
        const int64_t group = p.heads / p.cache.kv_heads, size = p.cache.head_dim, base = s.past + s.contexts;
        const float scale = 1.0f / std::sqrt(static_cast<float>(size));
        std::vector<float>& x = memory().x;
        x.resize(size);
        row.clear();
        query.resize((to - from) * group * head.steps);
        for (int64_t t = from; t < to; ++t) {
            const int64_t node = s.done + t, position = s.position(node);
            int64_t first = 0, end = p.sees == Sees::ALL ? base + s.done + s.queries : position + 1;
            if (p.window) {
                first = std::max<int64_t>(0, position - p.window + 1);
                end = std::min(end, position + p.window);
            }
            // A node that is as deep as there are nodes before it has them as ancestors: nothing lies elsewhere.
            const bool straight = position == base + node;
            for (int64_t g = 0; g < group; ++g) {
                rotate(p, p.query + ((s.first_query + t) * p.heads + kv_head * group + g) * size, position, x.data());
                for (float& value : x) value *= scale;
                E::factors(x.data(), size, query.data() + row.size() * head.steps);
                row.push_back({first, end, straight ? end : base, node});
            }
        }
        o.resize(row.size() * head.padded);
        state.resize(row.size());
    }

    // Rows of the cache for the positions of a node's branch, which begins behind the contexts.
    void branch(const Row& r, std::vector<int64_t>& at) const {
        at.resize(slot.depths[r.node] + 1);
        int64_t node = r.node;
        for (size_t i = at.size(); i-- > 0; node = slot.parents[node]) at[i] = slot.past + slot.contexts + node;
    }

    // The softmax of one part, anew.
    void run(int64_t part) {
        std::fill(o.begin(), o.end(), 0.0f);
        std::fill(state.begin(), state.end(), State{});
        for (int64_t u = part * (PART / UNIT); u < (part + 1) * (PART / UNIT); ++u) {
            const int64_t low = u * UNIT, high = low + UNIT;
            for (size_t r = 0; r < row.size();) {
                if (row[r].end <= low || row[r].first >= high) {
                    ++r;
                } else if (high > row[r].own && row[r].own < row[r].end) {
                    size_t after = r + 1;  // the heads of one token have one branch
                    while (after < row.size() && after - r < ROWS && row[after].node == row[r].node) ++after;
                    with_rows(static_cast<int>(after - r), [&](auto n) { branched<n()>(r, u); });
                    r = after;
                } else {
                    size_t after = r + 1;
                    while (after < row.size() && after - r < ROWS && row[after].end > low && row[after].first < high &&
                           !(high > row[after].own && row[after].own < row[after].end)) {
                        ++after;
                    }
                    with_rows(static_cast<int>(after - r), [&](auto n) { plain<n()>(r, u); });
                    r = after;
                }
            }
        }
    }

    // Rows r … r + N − 1 over a unit whose keys lie at their positions.
    template <int N>
    void plain(size_t r, int64_t u) {
        float scores[N][UNIT];
        run_unit<N>(
            r, u, scores,
            [&](float* const* out, const typename E::Factor* const* q) {
                score<E, N>(head.unit(u), head.steps, q, out);
            },
            [&](int64_t step, int64_t column) {
                return E::read(head.values + (u * UNIT / E::PAIR + step) * head.padded + column);
            });
    }

    // The N heads of a node over a unit that holds its branch: scores with the rows where they lie, then by position.
    template <int N>
    void branched(size_t r, int64_t u) {
        thread_local std::vector<int64_t> at;
        branch(row[r], at);
        const int64_t past = row[r].own, low = u * UNIT, end = std::min(row[r].end, low + UNIT);
        const auto place = [&](int64_t position) { return position < past ? position : at[position - past]; };
        float scores[N][UNIT];
        run_unit<N>(
            r, u, scores,
            [&](float* const* out, const typename E::Factor* const* q) {
                float found[N][UNIT];
                float* each[N];
                for (int n = 0; n < N; ++n) each[n] = found[n];
                int64_t held = -1;  // the unit in `found`
                for (int64_t position = low; position < end; ++position) {
                    const int64_t row_at = place(position);
                    if (row_at / UNIT != held) {
                        held = row_at / UNIT;
                        score<E, N>(head.unit(held), head.steps, q, each);
                    }
                    for (int n = 0; n < N; ++n) out[n][position - low] = found[n][row_at % UNIT];
                }
            },
            [&](int64_t step, int64_t column) {
                if constexpr (E::PAIR == 1) {
                    return E::read(head.values + place(low + step) * head.padded + column);
                } else {
                    const int64_t first = place(low + 2 * step);
                    const int64_t second = low + 2 * step + 1 < end ? place(low + 2 * step + 1) : first;
                    const U a = E::read(head.values + first / 2 * head.padded + column);
                    const U b = E::read(head.values + second / 2 * head.padded + column);
                    return (first % 2 ? a >> 16 : a & 0xffffu) | (second % 2 ? b & 0xffff0000u : b << 16);
                }
            });
    }

    template <int N, class Score, class At>
    void run_unit(size_t r, int64_t u, float (&scores)[N][UNIT], const Score& score_all, const At& at) {
        const typename E::Factor* q[N];
        float *out[N], *values[N];
        for (int n = 0; n < N; ++n) {
            q[n] = query.data() + (r + n) * head.steps;
            out[n] = scores[n];
            values[n] = o.data() + (r + n) * head.padded;
        }
        score_all(out, q);
        const int64_t low = u * UNIT;
        int64_t end = 0;
        typename E::Factor factors[N][UNIT / E::PAIR];
        const typename E::Factor* shares[N];
        for (int n = 0; n < N; ++n) {
            const float shrink = soften(scores[n], row[r + n].first - low, row[r + n].end - low, state[r + n]);
            if (shrink != 1.0f) {
                for (int64_t i = 0; i < head.padded; i += LANES) store(values[n] + i, load(values[n] + i) * shrink);
            }
            end = std::max(end, std::min(UNIT, row[r + n].end - low));
            E::factors(scores[n], UNIT, factors[n]);
            shares[n] = factors[n];
        }
        // Hidden positions have share 0 and add nothing, so those at the end are left out.
        weigh<E, N>(at, (end + E::PAIR - 1) / E::PAIR, shares, values, head.padded);
    }
};

// The left fold of parts: a joined with the part behind it.
void join(State& a, float* o, const State& b, const float* added, int64_t padded) {
    const float now = std::max(a.highest, b.highest);
    if (now == NONE) return;
    const float first = exponential(a.highest - now), second = exponential(b.highest - now);
    a.sum = a.sum * first + b.sum * second;
    a.highest = now;
    for (int64_t i = 0; i < padded; i += LANES) {
        store(o + i, fma(load(added + i), all(second), load(o + i) * first));
    }
}

template <class E>
void attend_stored(const AttentionPass& p, const Parallel& parallel) {
    const int64_t size = p.cache.head_dim, group = p.heads / p.cache.kv_heads, padded = p.cache.padded();
    struct Piece {
        int64_t slot, head, from, to, part, parts;  // part −1: all parts
        size_t at;                                  // rows before it in `partial`
    };
    std::vector<Placed> slots(p.count);
    int64_t contexts = 0, queries = 0, nodes = 0;
    for (int64_t n = 0; n < p.count; ++n) contexts += p.slots[n].contexts;
    int64_t context = 0;
    std::vector<Piece> pieces;
    pieces.reserve(p.count * p.cache.kv_heads);
    const int64_t tokens = std::max<int64_t>(1, 96 / group);
    for (int64_t n = 0; n < p.count; ++n) {
        Placed& s = slots[n];
        static_cast<SlotRows&>(s) = p.slots[n];
        s.first_context = context;
        s.first_query = contexts + queries;
        s.first_out = queries;
        if (p.sees == Sees::ANCESTORS) {
            s.parents = p.parents + nodes;
            for (int64_t i = 0; i < s.done + s.queries; ++i) {
                s.depths.push_back(s.parents[i] < 0 ? 0 : s.depths[s.parents[i]] + 1);
            }
        }
        context += s.contexts;
        queries += s.queries;
        nodes += s.done + s.queries;
        const int64_t parts = (s.past + s.contexts + s.done + s.queries + PART - 1) / PART;
        for (int64_t h = 0; h < p.cache.kv_heads; ++h) {
            for (int64_t t = 0; t < s.queries; t += tokens) {
                pieces.push_back({n, h, t, std::min(s.queries, t + tokens), -1, parts, 0});
            }
        }
    }
    // Keys and values first: a row sees those of other rows.
    const auto write = [&](size_t i) {
        const Placed& s = slots[i / p.cache.kv_heads];
        const auto h = static_cast<int64_t>(i % p.cache.kv_heads);
        const Head<E> head(p.cache, p.storage + s.slot * p.slot_stride, h);
        thread_local std::vector<float> x;
        thread_local std::vector<typename E::Word> packed;
        x.resize(size);
        packed.resize(head.steps);
        const auto put = [&](int64_t from, int64_t row, int64_t position) {
            const int64_t at = (from * p.cache.kv_heads + h) * size;
            rotate(p, p.key + at, position, x.data());
            E::pack(x.data(), size, packed.data());
            head.put_key(row, packed.data());
            head.put_value(row, p.value + at, size);
        };
        for (int64_t c = 0; c < s.contexts; ++c) put(s.first_context + c, s.past + c, s.past + c);
        for (int64_t t = 0; t < s.queries; ++t) {
            put(s.first_query + t, s.past + s.contexts + s.done + t, s.position(s.done + t));
        }
    };
    const auto spread = [&](size_t count, bool worth, const std::function<void(size_t)>& task) {
        if (count > 1 && worth) {
            parallel(count, task);
        } else {
            for (size_t i = 0; i < count; ++i) task(i);
        }
    };
    spread(p.count * p.cache.kv_heads, (contexts + queries) * size > 4096, write);

    // Too few pieces for several threads: parts apart.
    std::vector<Piece> whole;
    size_t partial_rows = 0;
    if (pieces.size() < ENOUGH) {
        std::vector<Piece> split;
        for (const Piece& piece : pieces) {
            if (piece.parts == 1) {
                split.push_back(piece);
                continue;
            }
            whole.push_back(piece);
            whole.back().at = partial_rows;
            for (int64_t part = 0; part < piece.parts; ++part) {
                split.push_back({piece.slot, piece.head, piece.from, piece.to, part, 1, partial_rows});
                partial_rows += (piece.to - piece.from) * group;
            }
        }
        pieces.swap(split);
    }
    std::vector<float> partial(partial_rows * padded);
    std::vector<State> partial_state(partial_rows);

    const auto finish = [&](const Piece& piece, size_t r, const State& state, const float* o) {
        const auto token = piece.from + static_cast<int64_t>(r) / group, g = static_cast<int64_t>(r) % group;
        float* out = p.out + ((slots[piece.slot].first_out + token) * p.heads + piece.head * group + g) * size;
        for (int64_t i = 0; i < size; ++i) out[i] = o[i] / state.sum;
    };
    const auto run = [&](size_t index) {
        const Piece& piece = pieces[index];
        Task<E> task(p, slots[piece.slot], piece.head, piece.from, piece.to);
        if (piece.part >= 0) {
            task.run(piece.part);
            std::copy(task.o.begin(), task.o.end(), partial.begin() + piece.at * padded);
            std::copy(task.state.begin(), task.state.end(), partial_state.begin() + piece.at);
            return;
        }
        task.run(0);
        if (piece.parts > 1) {
            std::vector<float> o = task.o;
            std::vector<State> state = task.state;
            for (int64_t part = 1; part < piece.parts; ++part) {
                task.run(part);
                for (size_t r = 0; r < state.size(); ++r) {
                    join(state[r], o.data() + r * padded, task.state[r], task.o.data() + r * padded, padded);
                }
            }
            task.o.swap(o);
            task.state.swap(state);
        }
        for (size_t r = 0; r < task.row.size(); ++r) finish(piece, r, task.state[r], task.o.data() + r * padded);
    };
    spread(pieces.size(), true, run);
    for (const Piece& piece : whole) {
        const size_t count = (piece.to - piece.from) * group;
        for (size_t r = 0; r < count; ++r) {
            State& state = partial_state[piece.at + r];
            float* o = partial.data() + (piece.at + r) * padded;
            for (int64_t part = 1; part < piece.parts; ++part) {
                const size_t other = piece.at + part * count + r;
                join(state, o, partial_state[other], partial.data() + other * padded, padded);
            }
            finish(piece, r, state, o);
        }
    }
}

}  // namespace

void attend(const AttentionPass& pass, const Parallel& parallel) {
    if (pass.cache.stored == Stored::FLOAT) {
        attend_stored<Float>(pass, parallel);
    } else {
        attend_stored<Half>(pass, parallel);
    }
}

void compact(const CacheShape& shape, unsigned char* layer, int64_t start, const int32_t* keep, int64_t kept) {
    for (int64_t h = 0; h < shape.kv_heads; ++h) {
        for (int64_t j = 0; j < kept; ++j) {
            if (keep[j] == j) continue;
            if (shape.stored == Stored::FLOAT) {
                Head<Float>(shape, layer, h).move(start + keep[j], start + j);
            } else {
                Head<Half>(shape, layer, h).move(start + keep[j], start + j);
            }
        }
    }
}

}  // namespace ddtree::cpu::DDTREE_ISA
