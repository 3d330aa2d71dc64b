// The best-first tree build, one block per sequence.
//
// The heap of the paper holds, for every popped node and the root, that node's next child that was not popped yet: the
// sibling of a popped node is the next child of its parent. So the heap is an array with one entry ("offer") per node,
// and a pop is a maximum over it. Lane l of one warp owns the offers of nodes l, l + 32, …, and knows the best of them:
// a pop is a maximum over the lanes, and then the two that own the popped node's parent and the new node look again.
// The log-probabilities that a build can reach are read once, into shared memory, by the whole block.

#include <cstring>

#include "common.cuh"
#include "ddtree/round.h"

namespace ddtree {

namespace {

constexpr int kBuildThreads = 128;
constexpr int kMaxOffers = kMaxDeviceBudget;  // the last node popped makes no offer
constexpr int kStaged = 16 * 1024;            // log-probabilities that shared memory has room for

// The state of one build, in shared memory. Node 0 is the root.
struct Nodes {
    double weight[1 + kMaxDeviceBudget];
    uint64_t offer[kMaxOffers];  // `ordered` weight of the next child
    int32_t next[kMaxOffers];    // rank of the next child
    int32_t parent[1 + kMaxDeviceBudget];
    int32_t rank[1 + kMaxDeviceBudget];   // among its parent's children
    int32_t depth[1 + kMaxDeviceBudget];  // 0 for the root
    int32_t count;                        // at the end
};

// What a build reads: log_probs [rows, columns], with `stride` values from row to row.
struct Rows {
    const float* log_probs;
    int rows, columns, stride;
};

// Bits in the order of the weights; 0 for a child that is none: of weight -inf or NaN. No weight is -0.
__device__ uint64_t ordered(double weight) {
    uint64_t bits;
    memcpy(&bits, &weight, sizeof(bits));
    const uint64_t sign = uint64_t{1} << 63;
    return weight > -__builtin_huge_val() ? bits ^ (bits & sign ? ~uint64_t{0} : sign) : 0;
}
__device__ double weight_of(uint64_t offer) {
    const uint64_t sign = uint64_t{1} << 63;
    const uint64_t bits = offer ^ (offer & sign ? sign : ~uint64_t{0});
    double weight;
    memcpy(&weight, &bits, sizeof(weight));
    return weight;
}

// Lexicographic order of the rank tuples of two offered children: the order of equal weights in the published heap.
// Climbs to where the two paths part. They always do: an offered child has no descendants yet, so neither tuple is the
// beginning of the other.
__device__ bool ranks_less(const Nodes& nodes, int a, int b) {
    int rank_a = nodes.next[a];
    int rank_b = nodes.next[b];
    const int depth_a = nodes.depth[a];
    const int depth_b = nodes.depth[b];
    for (int d = depth_a; d > depth_b; --d) {
        rank_a = nodes.rank[a];
        a = nodes.parent[a];
    }
    for (int d = depth_b; d > depth_a; --d) {
        rank_b = nodes.rank[b];
        b = nodes.parent[b];
    }
    while (a != b) {
        rank_a = nodes.rank[a];
        a = nodes.parent[a];
        rank_b = nodes.rank[b];
        b = nodes.parent[b];
    }
    return rank_a < rank_b;
}

// The node of the best offer among those of all lanes, or -1; a lane without one has the offer 0.
__device__ int best_of_warp(const Nodes& nodes, uint64_t offer, int node, uint64_t& best) {
    const auto high = static_cast<uint32_t>(offer >> 32);
    const uint32_t highest = device::warp_max(high);
    const uint32_t low = high == highest ? static_cast<uint32_t>(offer) : 0;
    const uint32_t lowest = device::warp_max(low);
    best = uint64_t{highest} << 32 | lowest;
    uint32_t equal = device::ballot(offer == best);
    int found = device::shuffle(node, device::first_bit(equal));
    for (equal &= equal - 1; equal != 0 && best != 0; equal &= equal - 1) {
        const int other = device::shuffle(node, device::first_bit(equal));
        if (ranks_less(nodes, other, found)) {
            found = other;
        }
    }
    return best == 0 ? -1 : found;
}

// The offer of the child of rank `rank` of a node of this weight and depth.
__device__ uint64_t offered(const Rows& rows, double weight, int depth, int rank) {
    return depth < rows.rows && rank < rows.columns
               ? ordered(weight + static_cast<double>(rows.log_probs[static_cast<int64_t>(depth) * rows.stride + rank]))
               : 0;
}

// Pops `wanted` nodes, or all there are; one warp.
__device__ void grow(Nodes& nodes, const Rows& rows, int wanted, int lane) {
    if (lane == 0) {
        nodes.weight[0] = 0.0;
        nodes.parent[0] = -1;
        nodes.rank[0] = 0;
        nodes.depth[0] = 0;
        nodes.next[0] = 0;
        nodes.offer[0] = offered(rows, 0.0, 0, 0);
    }
    device::sync_warp();
    uint64_t offer = lane == 0 ? nodes.offer[0] : 0;  // the best of this lane's
    int owner = 0;                                    // the node that makes it
    int count = 1;
    for (; count <= wanted; ++count) {
        uint64_t best;
        const int node = best_of_warp(nodes, offer, owner, best);
        if (node < 0) {
            break;
        }
        const double weight = weight_of(best);
        const int rank = nodes.next[node];
        const int depth = nodes.depth[node];
        // Lane 0 weighs the next sibling of the new node, lane 1 its first child.
        const bool sibling = lane == 0;
        const uint64_t fresh =
            offered(rows, sibling ? nodes.weight[node] : weight, sibling ? depth : depth + 1, sibling ? rank + 1 : 0);
        device::sync_warp();  // all has been read
        if (sibling) {
            nodes.next[node] = rank + 1;
            nodes.offer[node] = fresh;
        } else if (lane == 1) {
            nodes.weight[count] = weight;
            nodes.parent[count] = node;
            nodes.rank[count] = rank;
            nodes.depth[count] = depth + 1;
            if (count < kMaxOffers) {
                nodes.next[count] = 0;
                nodes.offer[count] = fresh;
            }
        }
        device::sync_warp();
        if (lane == node % kWarp || lane == count % kWarp) {
            offer = 0;
            for (int mine = lane; mine <= count && mine < kMaxOffers; mine += kWarp) {
                const uint64_t other = nodes.offer[mine];
                if (other > offer || (other == offer && other != 0 && ranks_less(nodes, mine, owner))) {
                    offer = other;
                    owner = mine;
                }
            }
        }
    }
    if (lane == 0) {
        nodes.count = count;
    }
}

__global__ void __launch_bounds__(kBuildThreads, 1) build(const TreeBuild a) {
    device::wait_and_trigger();
    DDTREE_DYNAMIC_SHARED(shared);
    Nodes& nodes = *reinterpret_cast<Nodes*>(shared);
    const int n = blockIdx.x;
    const int thread = threadIdx.x;
    const int64_t entry = static_cast<int64_t>(n) * a.positions_l * a.candidates_k;
    const float* log_probs = a.log_probs + entry;
    const int budget = a.budgets == nullptr ? a.tokens - 1 : clamped(a.budgets[n], 0, a.tokens - 1);
    const int wanted = budget == 0 ? 0 : larger(budget, a.outlook);

    // A node of rank r has r siblings before it, one at depth d its d - 1 ancestors.
    Rows rows{log_probs, smaller(a.positions_l, wanted), smaller(a.candidates_k, wanted), a.candidates_k};
    const int64_t values = static_cast<int64_t>(rows.rows) * rows.columns;
    if (values <= kStaged) {
        auto* staged = reinterpret_cast<float*>(shared + sizeof(Nodes));
        for (int i = thread; i < static_cast<int>(values); i += kBuildThreads) {
            staged[i] = log_probs[static_cast<int64_t>(i / rows.columns) * a.candidates_k + i % rows.columns];
        }
        rows.log_probs = staged;
        rows.stride = rows.columns;
    }
    device::sync_block();
    if (thread < kWarp) {
        grow(nodes, rows, wanted, thread);
    }
    device::sync_block();

    const int count = smaller(nodes.count, 1 + budget);
    const int64_t row = static_cast<int64_t>(n) * a.tokens;
    const int32_t* candidates = a.candidates + entry;
    const int32_t root = a.root_tokens[n];
    const int32_t past = a.past_len == nullptr ? 0 : a.past_len[n];
    for (int i = thread; i < a.tokens; i += kBuildThreads) {
        const bool drafted = i > 0 && i < count;
        const int depth = drafted ? nodes.depth[i] : 0;
        a.token_ids[row + i] =
            drafted ? candidates[static_cast<int64_t>(depth - 1) * a.candidates_k + nodes.rank[i]] : root;
        a.parents[row + i] = drafted ? nodes.parent[i] : -1;
        a.depths[row + i] = depth;
        if (a.positions != nullptr) {
            a.positions[row + i] = static_cast<int32_t>(static_cast<uint32_t>(past) + static_cast<uint32_t>(depth));
        }
    }
    const int64_t seen = static_cast<int64_t>(n) * a.outlook;
    for (int i = thread; i < a.outlook; i += kBuildThreads) {
        const bool found = i + 1 < nodes.count;
        a.log_weights[seen + i] = found ? static_cast<float>(nodes.weight[i + 1]) : -__builtin_huge_valf();
        a.outlook_depths[seen + i] = found ? nodes.depth[i + 1] : 0;
    }
    if (thread == 0) {
        a.counts[n] = count;
    }
}

// Values of log_probs that the block stages when it fits: as `build` counts them, of the largest budget.
size_t staged_bytes(const TreeBuild& call) {
    const int32_t most = larger(call.tokens - 1, call.outlook);
    const int64_t values = static_cast<int64_t>(smaller(call.positions_l, most)) * smaller(call.candidates_k, most);
    return static_cast<size_t>(smaller<int64_t>(values, kStaged)) * sizeof(float);
}

}  // namespace

Status device_build_tree(const TreeBuild& call, Stream stream) {
    if (call.sequences < 0 || call.positions_l < 0 || call.candidates_k < 0 || call.tokens < 1 ||
        call.tokens > 1 + kMaxDeviceBudget || call.outlook < 0 || call.outlook > kMaxDeviceBudget) {
        return Status::bad_shape;
    }
    if (call.sequences == 0) {
        return Status::ok;
    }
    const bool drafted = call.positions_l > 0 && call.candidates_k > 0;
    if (any_null(call.root_tokens, call.token_ids, call.parents, call.depths, call.counts) ||
        (drafted && any_null(call.log_probs, call.candidates)) ||
        (call.outlook > 0 && any_null(call.log_weights, call.outlook_depths))) {
        return Status::null_pointer;
    }
    return launch(build, dim3(static_cast<unsigned>(call.sequences)), dim3(kBuildThreads),
                  sizeof(Nodes) + staged_bytes(call), stream, call);
}

}  // namespace ddtree
