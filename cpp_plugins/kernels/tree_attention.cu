// The launcher of tree attention: every check the host can make, and the kernel for a call's extents.

#include <initializer_list>

#include "attention_combine.cuh"
#include "attention_kernels.cuh"

namespace ddtree {

namespace {

AttentionExtents extents(const TreeAttention& call) {
    return {call.sequences, call.tokens, call.q_heads, call.kv_heads, call.head_dim, call.capacity, call.splits};
}

template <ElementType kType, int kHeadDim, int kWarps>
Status launch_warps(const AttentionArgs& args, Stream stream) {
    const AttentionPlan& plan = args.plan;
    const int64_t pairs = static_cast<int64_t>(args.call.sequences) * args.call.kv_heads;
    const int64_t blocks = args.head_blocks + pairs * ceil_div(plan.tails, kWarps);
    if (blocks > INT32_MAX) {
        return Status::bad_shape;
    }
    const Status status = launch(attend<kType, kHeadDim, kWarps>, dim3(static_cast<unsigned>(blocks)),
                                 dim3(kWarp * kWarps), shared_bytes<kHeadDim>(kWarps, plan.folds), stream, args);
    if (status != Status::ok) {
        return status;
    }
    const dim3 rows(static_cast<unsigned>(ceil_div(plan.rows, kCombineWarps)), static_cast<unsigned>(pairs));
    return launch(combine<kType, kHeadDim>, rows, dim3(kWarp * kCombineWarps), 0, stream, args);
}

template <ElementType kType, int kHeadDim>
Status launch_typed(const AttentionArgs& args, Stream stream) {
    return args.plan.warps == 1 ? launch_warps<kType, kHeadDim, 1>(args, stream)
                                : launch_warps<kType, kHeadDim, 4>(args, stream);
}

Status check(const TreeAttention& call) {
    if (call.sequences < 0 || call.tokens < 0 || call.kv_heads < 1 || call.q_heads < call.kv_heads ||
        call.q_heads % call.kv_heads != 0 || call.slots < 1 || call.capacity < call.tokens || call.capacity < 1 ||
        call.splits < -1 || call.splits > 65535 || static_cast<int64_t>(call.sequences) * call.kv_heads > 65535 ||
        static_cast<int64_t>(call.tokens) * (call.q_heads / call.kv_heads) > (int64_t{1} << 30) ||
        call.capacity > (1 << 30) || !(call.scale > 0.0f) || !(call.scale < __builtin_huge_valf())) {
        return Status::bad_shape;
    }
    const bool head_dim_known = call.head_dim == 64 || call.head_dim == 128;
    const bool type_known = call.type == ElementType::bf16 || call.type == ElementType::fp16;
    const bool mode_known =
        call.mask_mode == MaskMode::tree || call.mask_mode == MaskMode::causal || call.mask_mode == MaskMode::none;
    if (!head_dim_known || !type_known || !mode_known) {
        return Status::unsupported;
    }
    return call.mask_mode == MaskMode::tree && call.mask_words < ceil_div(call.tokens, 32) ? Status::bad_shape
                                                                                           : Status::ok;
}

}  // namespace

size_t attention_workspace_bytes(const TreeAttention& call) {
    if (check(call) != Status::ok || call.sequences == 0 || call.tokens == 0) {
        return 0;
    }
    return partial_bytes(extents(call));
}

size_t attention_workspace_bound(const TreeAttention& call) {
    return check(call) != Status::ok || call.sequences == 0 || call.tokens == 0 ? 0 : most_partial_bytes(extents(call));
}

Status tree_attention(const TreeAttention& call, Stream stream) {
    const Status status = check(call);
    if (status != Status::ok || call.sequences == 0 || call.tokens == 0) {
        return status;
    }
    if (any_null(call.q, call.k, call.v, call.past_k, call.past_v, call.present_k, call.present_v, call.slot_ids,
                 call.past_len, call.out) ||
        (call.mask_mode == MaskMode::tree && call.tree_mask == nullptr)) {
        return Status::null_pointer;
    }
    for (const void* pointer : {call.q, call.k, call.v, call.past_k, call.past_v,
                                static_cast<const void*>(call.present_k), static_cast<const void*>(call.present_v),
                                static_cast<const void*>(call.out), static_cast<const void*>(call.workspace)}) {
        if (!aligned16(pointer)) {
            return Status::misaligned;
        }
    }
    const size_t needed = attention_workspace_bytes(call);
    if (needed > 0 && (call.workspace == nullptr || call.workspace_bytes < needed)) {
        return Status::workspace_too_small;
    }

    AttentionArgs args{call, plan_attention(extents(call)), 1, 0, call.scale * kLog2E, nullptr, nullptr};
    const AttentionPlan& plan = args.plan;
    const int64_t blocks = static_cast<int64_t>(call.sequences) * call.kv_heads * plan.row_tiles;
    if (!plan.folds) {
        // One wave: a multiprocessor has shared memory for so many. past_len is on the device, so one division must
        // serve every length: a short past leaves blocks without work.
        const int32_t multiprocessors = device::multiprocessors();
        if (multiprocessors < 1) {
            return Status::launch_failed;
        }
        const int64_t room = larger<int64_t>(1, multiprocessors * (plan.warps == 1 ? 3 : 2) / blocks);
        args.sharing = smaller(plan.units, call.splits > 0 ? call.splits : static_cast<int32_t>(room));
    }
    if (blocks * args.sharing > INT32_MAX) {
        return Status::bad_shape;
    }
    args.head_blocks = static_cast<int32_t>(blocks * args.sharing);
    args.partial_out = static_cast<float*>(call.workspace);
    args.partial_sum = args.partial_out + partial_rows(extents(call), plan) * call.head_dim;
    if (call.type == ElementType::bf16) {
        return call.head_dim == 64 ? launch_typed<ElementType::bf16, 64>(args, stream)
                                   : launch_typed<ElementType::bf16, 128>(args, stream);
    }
    return call.head_dim == 64 ? launch_typed<ElementType::fp16, 64>(args, stream)
                               : launch_typed<ElementType::fp16, 128>(args, stream);
}

}  // namespace ddtree
