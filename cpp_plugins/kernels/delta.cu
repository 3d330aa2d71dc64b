// Gated delta nets over trees. No product of matrices: a node meets its ancestors only, of which a tree has few, so
// that warps take the nodes of one depth after the other.

#include "common.cuh"
#include "ddtree/delta.h"

namespace ddtree {

namespace {

constexpr int kDeltaWarps = 8;
constexpr int kDeltaThreads = kWarp * kDeltaWarps;
constexpr int kKeys = kMaxDeltaKeys / kWarp;  // elements of a key in a lane
constexpr float kNorm = 1e-6f;                // added to the square of a norm
constexpr int kCommitRows = 8;                // of a state, in a thread

// Of queries or keys; elements past Dk are 0.
__device__ void load(const float* from, int dim, float (&x)[kKeys]) {
    DDTREE_UNROLL
    for (int e = 0; e < kKeys; ++e) {
        const int d = static_cast<int>(threadIdx.x) % kWarp + e * kWarp;
        x[e] = d < dim ? from[d] : 0.0f;
    }
}
__device__ float dot(const float (&x)[kKeys], const float (&y)[kKeys]) {
    float sum = 0.0f;
    DDTREE_UNROLL
    for (int e = 0; e < kKeys; ++e) {
        sum += x[e] * y[e];
    }
    return warp_sum(sum);
}
__device__ float inverse_norm(const float (&x)[kKeys]) { return 1.0f / sqrtf(dot(x, x) + kNorm); }

// A block has 32 columns of a value head's state and of its nodes' values, one column a lane.
__global__ void __launch_bounds__(kDeltaThreads) tree(const DeltaTree a) {
    device::wait_and_trigger();
    DDTREE_DYNAMIC_SHARED(shared);
    auto* state = reinterpret_cast<float*>(shared);                        // [Dk, 32]
    auto* changes = state + a.key_dim * kWarp;                             // [T, 32]: u
    auto* norms = changes + a.tokens * kWarp;                              // [T], inverse, of keys
    auto* own = norms + a.tokens + 2 * a.key_dim * (threadIdx.x / kWarp);  // [2, Dk]: a warp's key and query
    auto* depths = reinterpret_cast<int32_t*>(norms + a.tokens + 2 * a.key_dim * kDeltaWarps);  // [T]
    auto* deepest = reinterpret_cast<uint32_t*>(depths + a.tokens);

    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
    const int head = blockIdx.y, key_head = head / (a.value_heads / a.key_heads);
    const int column = static_cast<int>(blockIdx.x) * kWarp + lane;
    const bool inside = column < a.value_dim;
    const int64_t first = static_cast<int64_t>(blockIdx.z) * a.tokens;  // row
    const int32_t* parents = a.parents + first;
    const int64_t channels = (2 * static_cast<int64_t>(a.key_heads) * a.key_dim) + a.value_heads * a.value_dim;
    const float* queries = a.mixed + first * channels + static_cast<int64_t>(key_head) * a.key_dim;
    const float* keys = queries + static_cast<int64_t>(a.key_heads) * a.key_dim;
    const float* values =
        a.mixed + first * channels + 2 * static_cast<int64_t>(a.key_heads) * a.key_dim + head * a.value_dim + column;
    const auto log_decay = [&](int node) { return a.log_decays[(first + node) * a.value_heads + head]; };
    const auto parent_of = [&](int node) {
        const int parent = parents[node];
        return parent < node ? parent : -1;
    };

    const int slot = clamped(a.slot_ids[blockIdx.z], 0, a.slots - 1);
    const float* stored = a.states + (static_cast<int64_t>(slot) * a.value_heads + head) * a.key_dim * a.value_dim;
    for (int d = thread / kWarp; d < a.key_dim; d += kDeltaWarps) {
        state[d * kWarp + lane] = inside ? stored[static_cast<int64_t>(d) * a.value_dim + column] : 0.0f;
    }
    if (thread == 0) {
        *deepest = 0;
    }
    device::sync_block();
    for (int node = thread; node < a.tokens; node += kDeltaThreads) {
        int depth = 0;
        double total = 0;
        for (int at = node; at >= 0; at = parent_of(at), ++depth) {
            total += log_decay(at);
        }
        depths[node] = depth;
        device::atomic_max(deepest, static_cast<uint32_t>(depth));
        if (blockIdx.x == 0) {
            a.decays[(first + node) * a.value_heads + head] = total;
        }
    }
    device::sync_block();

    for (int depth = 1; depth <= static_cast<int>(*deepest); ++depth) {
        for (int node = thread / kWarp; node < a.tokens; node += kDeltaWarps) {
            if (depths[node] != depth) {
                continue;
            }
            float key[kKeys], query[kKeys];
            load(keys + node * channels, a.key_dim, key);
            load(queries + node * channels, a.key_dim, query);
            const float of_key = inverse_norm(key);
            const float of_query = inverse_norm(query) / sqrtf(static_cast<float>(a.key_dim));
            DDTREE_UNROLL
            for (int e = 0; e < kKeys; ++e) {
                const int d = lane + e * kWarp;
                key[e] *= of_key;
                query[e] *= of_query;
                if (d < a.key_dim) {
                    own[d] = key[e];
                    own[a.key_dim + d] = query[e];
                    if (blockIdx.x == 0 && head % (a.value_heads / a.key_heads) == 0) {
                        a.keys[((first + node) * a.key_heads + key_head) * a.key_dim + d] = key[e];
                    }
                }
            }
            if (lane == 0) {
                norms[node] = of_key;
            }
            device::sync_warp();
            float known = 0.0f, read = 0.0f;
            for (int d = 0; d < a.key_dim; ++d) {
                known += own[d] * state[d * kWarp + lane];
                read += own[a.key_dim + d] * state[d * kWarp + lane];
            }
            // From the parent up to the root: the decay from an ancestor to the node is that of what is between them.
            float since = log_decay(node), of_path = 0.0f, seen = 0.0f;
            for (int at = parent_of(node); at >= 0; at = parent_of(at)) {
                float other[kKeys];
                load(keys + at * channels, a.key_dim, other);
                const float share = expf(since) * norms[at], change = changes[at * kWarp + lane];
                of_path += dot(key, other) * share * change;
                seen += dot(query, other) * share * change;
                since += log_decay(at);
            }
            const float decay = expf(since), step = a.steps[(first + node) * a.value_heads + head];
            const float value = inside ? values[node * channels] : 0.0f;
            const float change = step * (value - decay * known - of_path);
            const float result = decay * read + seen + dot(key, query) * change;
            changes[node * kWarp + lane] = change;
            if (inside) {
                const int64_t at = ((first + node) * a.value_heads + head) * a.value_dim + column;
                a.updates[at] = change;
                a.out[at] = result;
            }
            device::sync_warp();  // `own` is the next node's
        }
        device::sync_block();
    }
}

__device__ float input(const DeltaCommit& a, int64_t at) {
    if (a.single != 0) {
        return static_cast<const float*>(a.inputs)[at];
    }
    const uint32_t bits = static_cast<const uint16_t*>(a.inputs)[at];
    return a.type == ElementType::bf16 ? device::widened<ElementType::bf16>(bits)
                                       : device::widened<ElementType::fp16>(bits);
}

// Blocks of a layer are for kCommitRows rows of a head's state, a thread for a column of them; the last ones are for
// the convolution's inputs, a thread for a channel, whose rows move in rising order: no scratch, no race.
__global__ void __launch_bounds__(kDeltaThreads) commit(const DeltaCommit a) {
    device::wait_and_trigger();
    const int64_t layer = blockIdx.y, rows = layer * a.rows;
    const int thread = static_cast<int>(threadIdx.x), parts = ceil_div(a.key_dim, kCommitRows);
    const auto row = [&](int m) { return rows + clamped(a.path == nullptr ? a.first + m : a.path[m], 0, a.rows - 1); };
    const int block = static_cast<int>(blockIdx.x) - a.value_heads * parts;
    if (block >= 0) {
        const int channels = 2 * a.key_heads * a.key_dim + a.value_heads * a.value_dim;
        const int channel = block * kDeltaThreads + thread;
        if (channel >= channels) {
            return;
        }
        float* past = a.past + (layer * a.slots + a.slot) * a.past_rows * channels + channel;
        for (int to = 0; to < a.past_rows; ++to) {
            const int from = to + a.path_rows;
            past[static_cast<int64_t>(to) * channels] = from < a.past_rows
                                                            ? past[static_cast<int64_t>(from) * channels]
                                                            : input(a, row(from - a.past_rows) * channels + channel);
        }
        return;
    }
    const int head = static_cast<int>(blockIdx.x) / parts, key_head = head / (a.value_heads / a.key_heads);
    const int begin = static_cast<int>(blockIdx.x) % parts * kCommitRows;
    float* state = a.states + ((layer * a.slots + a.slot) * a.value_heads + head) * a.key_dim * a.value_dim;
    const double last = a.decays[row(a.path_rows - 1) * a.value_heads + head];
    const float decay = expf(static_cast<float>(last));
    for (int column = thread; column < a.value_dim; column += kDeltaThreads) {
        float sum[kCommitRows];
        DDTREE_UNROLL
        for (int r = 0; r < kCommitRows; ++r) {
            const bool inside = begin + r < a.key_dim;
            sum[r] = inside ? decay * state[static_cast<int64_t>(begin + r) * a.value_dim + column] : 0.0f;
        }
        for (int m = 0; m < a.path_rows; ++m) {
            const int64_t at = row(m);
            const float share = expf(static_cast<float>(last - a.decays[at * a.value_heads + head]));
            const float change = share * a.updates[(at * a.value_heads + head) * a.value_dim + column];
            const float* key = a.keys + (at * a.key_heads + key_head) * a.key_dim;
            DDTREE_UNROLL
            for (int r = 0; r < kCommitRows; ++r) {
                sum[r] += (begin + r < a.key_dim ? key[begin + r] : 0.0f) * change;
            }
        }
        DDTREE_UNROLL
        for (int r = 0; r < kCommitRows; ++r) {
            if (begin + r < a.key_dim) {
                state[static_cast<int64_t>(begin + r) * a.value_dim + column] = sum[r];
            }
        }
    }
}

bool fits(int32_t key_heads, int32_t value_heads, int32_t key_dim, int32_t value_dim) {
    return key_heads >= 1 && value_heads >= 1 && value_heads <= 65535 && value_heads % key_heads == 0 && key_dim >= 1 &&
           value_dim >= 1;
}

}  // namespace

Status delta_tree(const DeltaTree& call, Stream stream) {
    if (call.sequences < 0 || call.sequences > 65535 || call.tokens < 0 || call.slots < 1 ||
        !fits(call.key_heads, call.value_heads, call.key_dim, call.value_dim)) {
        return Status::bad_shape;
    }
    if (call.tokens > kMaxDeltaTokens || call.key_dim > kMaxDeltaKeys) {
        return Status::unsupported;
    }
    if (call.sequences == 0 || call.tokens == 0) {
        return Status::ok;
    }
    if (any_null(call.mixed, call.log_decays, call.steps, call.parents, call.states, call.slot_ids, call.out, call.keys,
                 call.updates, call.decays)) {
        return Status::null_pointer;
    }
    const dim3 grid(static_cast<unsigned>(ceil_div(call.value_dim, kWarp)), static_cast<unsigned>(call.value_heads),
                    static_cast<unsigned>(call.sequences));
    const size_t words = (call.key_dim + call.tokens) * kWarp + 2 * call.tokens + 2 * call.key_dim * kDeltaWarps + 1;
    return launch(tree, grid, dim3(kDeltaThreads), 4 * words, stream, call);
}

Status delta_commit(const DeltaCommit& call, Stream stream) {
    if (call.layers < 0 || call.layers > 65535 || call.slots < 1 || call.slot < 0 || call.slot >= call.slots ||
        call.rows < 1 || call.path_rows < 0 || call.past_rows < 0 ||
        !fits(call.key_heads, call.value_heads, call.key_dim, call.value_dim)) {
        return Status::bad_shape;
    }
    if (call.layers == 0 || call.path_rows == 0) {
        return Status::ok;
    }
    if (any_null(call.states, call.past, call.keys, call.updates, call.decays, call.inputs)) {
        return Status::null_pointer;
    }
    const int channels = 2 * call.key_heads * call.key_dim + call.value_heads * call.value_dim;
    const int blocks = call.value_heads * ceil_div(call.key_dim, kCommitRows) + ceil_div(channels, kDeltaThreads);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(call.layers));
    return launch(commit, grid, dim3(kDeltaThreads), 0, stream, call);
}

}  // namespace ddtree
