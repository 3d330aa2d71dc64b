// The arithmetic of cpu_delta.h for one instruction set: included behind attention/kernel.inl, whose vectors it uses.
#include "ddtree/cpu_delta.h"

namespace ddtree::cpu::DDTREE_ISA {
namespace {

constexpr int WIDE =
    LANES / 2;  // vectors of a state's row that are summed at a time: two sums of each fit the registers

inline V silu(V x) {
    const V e = exponential(-larger(x, -x));
    return x * (x < V{} ? e : all(1.0f)) / (e + 1.0f);
}

inline float dot(const float* a, const float* b, int64_t size) {
    V sum{};
    for (int64_t i = 0; i < size; i += LANES) sum = fma(load(a + i), load(b + i), sum);
    return total(sum);
}

// Sᵀk and Sᵀq [Dv] of a state [Dk, Dv]: each a sum over its rows in their order.
template <int N>
void look_at(const float* state, const DeltaShape& shape, const float* k, const float* q, float* by_k, float* by_q) {
    V first[N] = {}, second[N] = {};
    for (int64_t r = 0; r < shape.key_dim; ++r) {
        for (int n = 0; n < N; ++n) {
            const V s = load(state + r * shape.value_dim + n * LANES);
            first[n] = fma(s, all(k[r]), first[n]);
            second[n] = fma(s, all(q[r]), second[n]);
        }
    }
    for (int n = 0; n < N; ++n) {
        store(by_k + n * LANES, first[n]);
        store(by_q + n * LANES, second[n]);
    }
}
void look(const float* state, const DeltaShape& shape, const float* k, const float* q, float* by_k, float* by_q) {
    int64_t column = 0;
    for (; column + WIDE * LANES <= shape.value_dim; column += WIDE * LANES) {
        look_at<WIDE>(state + column, shape, k, q, by_k + column, by_q + column);
    }
    for (; column < shape.value_dim; column += LANES) {
        look_at<1>(state + column, shape, k, q, by_k + column, by_q + column);
    }
}

// A head of a row: what moves its state.
struct Move {
    const float *q, *k, *v;
    float a, b;

    Move(const DeltaShape& s, const float* row, int64_t head) {
        const float* mixed = row + s.channels();
        const int64_t key = head * s.key_heads / s.value_heads * s.key_dim;
        q = mixed + key;
        k = mixed + s.keys() + key;
        v = mixed + 2 * s.keys() + head * s.value_dim;
        a = mixed[s.channels() + head];
        b = mixed[s.channels() + s.value_heads + head];
    }

    // d [Dv] from Sᵀk, in its place.
    void difference(const DeltaShape& s, float* by_k) const {
        for (int64_t i = 0; i < s.value_dim; i += LANES) {
            store(by_k + i, (load(v + i) - all(a) * load(by_k + i)) * b);
        }
    }
    void apply(const DeltaShape& s, const float* from, float* to, const float* d) const {
        for (int64_t r = 0; r < s.key_dim; ++r) {
            for (int64_t i = 0; i < s.value_dim; i += LANES) {
                const int64_t at = r * s.value_dim + i;
                store(to + at, fma(all(k[r]), load(d + i), all(a) * load(from + at)));
            }
        }
    }
};

// A row's moves: its inputs through the convolution over its ancestors' and the slot's last ones.
void prepare(const DeltaPass& pass, const SlotRows& slot, const int32_t* parents, int64_t first, int64_t node) {
    const DeltaShape& s = pass.shape;
    const float* past = pass.states + slot.slot * s.state_values() + s.value_heads * s.state();
    const float* inputs[16];
    int64_t back = s.taps - 1;
    for (int64_t tap = s.taps - 1, at = node; tap >= 0; --tap) {
        inputs[tap] = at >= 0 ? pass.projected + (first + at) * s.projected() : past + --back * s.channels();
        if (at >= 0) at = parents[at];
    }
    const float* own = inputs[s.taps - 1];
    float* raw = pass.moves + (first + node) * s.moved_values();
    float* mixed = raw + s.channels();
    std::copy(own, own + s.channels(), raw);
    for (int64_t c = 0; c < s.channels(); c += LANES) {
        V sum{};
        for (int64_t tap = 0; tap < s.taps; ++tap) {
            sum = fma(load(pass.conv + tap * s.channels() + c), load(inputs[tap] + c), sum);
        }
        store(mixed + c, silu(sum));
    }
    for (int64_t head = 0; head < 2 * s.key_heads; ++head) {
        float* x = mixed + head * s.key_dim;
        float scale = 1.0f / std::sqrt(dot(x, x, s.key_dim) + 1e-6f);
        if (head < s.key_heads) scale /= std::sqrt(static_cast<float>(s.key_dim));
        for (int64_t i = 0; i < s.key_dim; i += LANES) store(x + i, load(x + i) * scale);
    }
    const float *steps = own + s.channels() + s.values(), *decays = steps + s.value_heads;
    float *a = mixed + s.channels(), *b = a + s.value_heads;
    for (int64_t h = 0; h < s.value_heads; ++h) {
        const float x = decays[h] + pass.step_bias[h];
        a[h] = std::exp(pass.decay[h] * (x > 20.0f ? x : std::log1p(std::exp(x))));
        b[h] = 1.0f / (1.0f + std::exp(-steps[h]));
    }
}

// A node in the order of a walk: its state goes from one buffer to another, which may be the same one.
struct Visit {
    int64_t node;
    int64_t from;  // −1: the slot's state
    int64_t to;    // −1: nobody goes on from it
};

// Children behind their parents, one subtree after the other, so that few states are kept at a time; `buffers` is how
// many. The last child takes its parent's place.
std::vector<Visit> walk(const int32_t* parents, int64_t nodes, int64_t& buffers) {
    std::vector<std::vector<int64_t>> children(static_cast<size_t>(nodes));
    std::vector<int64_t> open, kept(static_cast<size_t>(nodes), -1), free;
    for (int64_t i = nodes; i-- > 0;) {
        if (parents[i] < 0) {
            open.push_back(i);
        } else {
            children[parents[i]].push_back(i);  // falling
        }
    }
    std::vector<Visit> order;
    buffers = 0;
    while (!open.empty()) {
        const int64_t node = open.back(), parent = parents[node];
        open.pop_back();
        Visit visit{node, parent < 0 ? -1 : kept[parent], -1};
        if (parent >= 0) {
            children[parent].pop_back();
            if (children[parent].empty()) free.push_back(kept[parent]);  // the smallest is the last to be pushed
        }
        if (!children[node].empty()) {
            if (free.empty()) free.push_back(buffers++);
            visit.to = kept[node] = free.back();
            free.pop_back();
            open.insert(open.end(), children[node].begin(), children[node].end());
        }
        order.push_back(visit);
    }
    return order;
}

// One value head of a slot's nodes.
void attend_head(const DeltaPass& pass, const SlotRows& slot, const std::vector<Visit>& order, int64_t buffers,
                 int64_t first, int64_t head) {
    const DeltaShape& s = pass.shape;
    thread_local std::vector<float> memory;
    memory.resize(std::max(memory.size(), static_cast<size_t>(buffers * s.state() + 2 * s.value_dim)));
    float *by_k = memory.data(), *by_q = by_k + s.value_dim, *states = by_q + s.value_dim;
    const float* past = pass.states + slot.slot * s.state_values() + head * s.state();
    for (const Visit& visit : order) {
        const int64_t row = first + visit.node;
        const Move move(s, pass.moves + row * s.moved_values(), head);
        const float* from = visit.from < 0 ? past : states + visit.from * s.state();
        look(from, s, move.k, move.q, by_k, by_q);
        move.difference(s, by_k);
        if (visit.to >= 0) move.apply(s, from, states + visit.to * s.state(), by_k);
        const V share = all(dot(move.q, move.k, s.key_dim)), a = all(move.a);
        V squares{};
        for (int64_t i = 0; i < s.value_dim; i += LANES) {
            const V o = fma(share, load(by_k + i), a * load(by_q + i));
            store(by_q + i, o);
            squares = fma(o, o, squares);
        }
        const float scale = 1.0f / std::sqrt(total(squares) / static_cast<float>(s.value_dim) + pass.epsilon);
        const float* gate = pass.projected + row * s.projected() + s.channels() + head * s.value_dim;
        float* out = pass.out + row * s.values() + head * s.value_dim;
        for (int64_t i = 0; i < s.value_dim; i += LANES) {
            store(out + i, load(by_q + i) * scale * load(pass.head_norm + i) * silu(load(gate + i)));
        }
    }
}

}  // namespace

void delta(const DeltaPass& pass, const Parallel& parallel) {
    struct Trees {
        const SlotRows* slot;
        const int32_t* parents;
        int64_t first, buffers;
        std::vector<Visit> order;
    };
    std::vector<Trees> trees;
    std::vector<std::pair<size_t, int64_t>> rows;
    int64_t first = 0;
    for (int64_t n = 0; n < pass.count; ++n) {
        Trees tree{pass.slots + n, pass.parents + first, first, 0, {}};
        tree.order = walk(tree.parents, tree.slot->queries, tree.buffers);
        for (int64_t i = 0; i < tree.slot->queries; ++i) rows.emplace_back(trees.size(), i);
        first += tree.slot->queries;
        trees.push_back(std::move(tree));
    }
    parallel(rows.size(), [&](size_t i) {
        const Trees& tree = trees[rows[i].first];
        prepare(pass, *tree.slot, tree.parents, tree.first, rows[i].second);
    });
    const auto heads = static_cast<size_t>(pass.shape.value_heads);
    parallel(trees.size() * heads, [&](size_t i) {
        const Trees& tree = trees[i / heads];
        attend_head(pass, *tree.slot, tree.order, tree.buffers, tree.first, static_cast<int64_t>(i % heads));
    });
}

void delta_commit(const DeltaShape& s, float* state, const float* moves, const int32_t* rows, int64_t count) {
    std::vector<float> seen(static_cast<size_t>(2 * s.value_dim));
    for (int64_t head = 0; head < s.value_heads; ++head) {
        float* own = state + head * s.state();
        for (int64_t j = 0; j < count; ++j) {
            const Move move(s, moves + rows[j] * s.moved_values(), head);
            look(own, s, move.k, move.q, seen.data(), seen.data() + s.value_dim);
            move.difference(s, seen.data());
            move.apply(s, own, own, seen.data());
        }
    }
    float* past = state + s.value_heads * s.state();
    for (int64_t i = 0; i < s.taps - 1; ++i) {
        const int64_t from = i + count - (s.taps - 1);  // of the path's rows; before them the past's
        const float* input = from >= 0 ? moves + rows[from] * s.moved_values() : past + (i + count) * s.channels();
        std::copy(input, input + s.channels(), past + i * s.channels());
    }
}

}  // namespace ddtree::cpu::DDTREE_ISA
