// The best-first tree build, one warp per sequence.
//
// The heap of the paper holds, for every popped node and the root, that node's next child that was not popped yet: the
// sibling of a popped node is the next child of its parent. So the heap is an array with one entry ("offer") per node,
// and a pop is a maximum over it. Offers are kept in groups of 32; each lane remembers the best of one group, so a pop
// costs two reductions over a warp, whatever the budget.

#include "common.cuh"
#include "ddtree/round.h"

namespace ddtree {

namespace {

constexpr int kMaxOffers = kMaxDeviceBudget;  // the last node popped makes no offer
static_assert(kMaxOffers == kWarp * kWarp, "one group of 32 offers per lane");

struct Offer {
    double weight;
    int32_t node;  // the node whose child is offered; -1 for none
};

// The state of one build, in shared memory. Node 0 is the root.
struct Nodes {
    double weight[1 + kMaxDeviceBudget];
    int32_t parent[1 + kMaxDeviceBudget];
    int32_t rank[1 + kMaxDeviceBudget];   // among its parent's children
    int32_t depth[1 + kMaxDeviceBudget];  // 0 for the root
    double offer[kMaxOffers];             // weight of the next child
    int32_t next[kMaxOffers];             // rank of the next child
};

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

__device__ bool better(const Nodes& nodes, const Offer& a, const Offer& b) {
    if (a.node < 0 || b.node < 0 || a.node == b.node) {
        return a.node >= 0 && b.node < 0;
    }
    return a.weight != b.weight ? a.weight > b.weight : ranks_less(nodes, a.node, b.node);
}

__device__ Offer best_of_warp(const Nodes& nodes, Offer mine) {
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
        const Offer other{device::shuffle_xor(mine.weight, lanes), device::shuffle_xor(mine.node, lanes)};
        if (better(nodes, other, mine)) {
            mine = other;
        }
    }
    return mine;
}

// The child of rank `rank` of `node`; -inf when there is none or its weight is.
__device__ double child_weight(const TreeBuild& a, const float* log_probs, const Nodes& nodes, int node, int rank) {
    const double impossible = -__builtin_huge_val();
    if (rank >= a.candidates_k || nodes.depth[node] >= a.positions_l) {
        return impossible;
    }
    const double weight =
        nodes.weight[node] +
        static_cast<double>(log_probs[static_cast<int64_t>(nodes.depth[node]) * a.candidates_k + rank]);
    return weight > impossible ? weight : impossible;  // NaN too
}

__device__ Offer offer_of(const Nodes& nodes, int node) {
    const bool alive = nodes.offer[node] > -__builtin_huge_val();
    return {nodes.offer[node], alive ? node : -1};
}

__global__ void __launch_bounds__(kWarp) build(const TreeBuild a) {
    DDTREE_DYNAMIC_SHARED(shared);
    Nodes& nodes = *reinterpret_cast<Nodes*>(shared);
    const int n = blockIdx.x;
    const int lane = threadIdx.x;
    const int64_t row = static_cast<int64_t>(n) * a.tokens;
    const int64_t entry = static_cast<int64_t>(n) * a.positions_l * a.candidates_k;
    const float* log_probs = a.log_probs + entry;
    const int budget = a.budgets == nullptr ? a.tokens - 1 : clamped(a.budgets[n], 0, a.tokens - 1);

    if (lane == 0) {
        nodes.weight[0] = 0.0;
        nodes.parent[0] = -1;
        nodes.rank[0] = 0;
        nodes.depth[0] = 0;
        nodes.next[0] = 0;
        nodes.offer[0] = child_weight(a, log_probs, nodes, 0, 0);
    }
    device::sync_warp();

    Offer group{0.0, -1};  // the best offer of nodes 32 * lane ... 32 * lane + 31
    if (lane == 0) {
        group = offer_of(nodes, 0);
    }
    int count = 1;
    while (count <= budget) {
        const Offer best = best_of_warp(nodes, group);
        if (best.node < 0) {
            break;
        }
        const int node = best.node;
        device::sync_warp();  // all comparisons of ranks are done
        if (lane == 0) {
            nodes.weight[count] = best.weight;
            nodes.parent[count] = node;
            nodes.rank[count] = nodes.next[node];
            nodes.depth[count] = nodes.depth[node] + 1;
            nodes.next[node] += 1;
            nodes.offer[node] = child_weight(a, log_probs, nodes, node, nodes.next[node]);
            if (count < kMaxOffers) {
                nodes.next[count] = 0;
                nodes.offer[count] = child_weight(a, log_probs, nodes, count, 0);
            }
        }
        device::sync_warp();
        // Two groups changed: that of the popped node's parent, and that of the new node, which may be the same one.
        const int changed = node / kWarp;
        const int member = changed * kWarp + lane;
        const Offer again = best_of_warp(nodes, member < count ? offer_of(nodes, member) : Offer{0.0, -1});
        if (lane == changed) {
            group = again;
        }
        if (count < kMaxOffers && lane == count / kWarp) {
            const Offer fresh = offer_of(nodes, count);
            if (better(nodes, fresh, group)) {
                group = fresh;
            }
        }
        ++count;
    }

    device::sync_warp();
    const int32_t* candidates = a.candidates + entry;
    const int32_t root = a.root_tokens[n];
    const int32_t past = a.past_len == nullptr ? 0 : a.past_len[n];
    for (int i = lane; i < a.tokens; i += kWarp) {
        const bool drafted = i > 0 && i < count;
        const int depth = drafted ? nodes.depth[i] : 0;
        a.token_ids[row + i] =
            drafted ? candidates[static_cast<int64_t>(depth - 1) * a.candidates_k + nodes.rank[i]] : root;
        a.parents[row + i] = drafted ? nodes.parent[i] : -1;
        a.depths[row + i] = depth;
        if (a.positions != nullptr) {
            a.positions[row + i] = static_cast<int32_t>(static_cast<uint32_t>(past) + static_cast<uint32_t>(depth));
        }
        if (a.log_weights != nullptr) {
            a.log_weights[row + i] = drafted ? nodes.weight[i] : 0.0;
        }
    }
    if (lane == 0) {
        a.counts[n] = count;
    }
}

}  // namespace

Status device_build_tree(const TreeBuild& call, Stream stream) {
    if (call.sequences < 0 || call.positions_l < 0 || call.candidates_k < 0 || call.tokens < 1 ||
        call.tokens > 1 + kMaxDeviceBudget) {
        return Status::bad_shape;
    }
    if (call.sequences == 0) {
        return Status::ok;
    }
    const bool drafted = call.positions_l > 0 && call.candidates_k > 0;
    if (any_null(call.root_tokens, call.token_ids, call.parents, call.depths, call.counts) ||
        (drafted && any_null(call.log_probs, call.candidates))) {
        return Status::null_pointer;
    }
    return launch(build, dim3(static_cast<unsigned>(call.sequences)), dim3(kWarp), sizeof(Nodes), stream, call);
}

}  // namespace ddtree
