// The launcher of tree attention: every check the host can make, and the kernel for a call's extents.

#include <initializer_list>

#include "attention_combine.cuh"
#include "attention_kernels.cuh"

namespace ddtree {

namespace {

AttentionExtents extents(const TreeAttention& call) {
    return {call.sequences, call.tokens, call.q_heads, call.kv_heads, call.head_dim, call.capacity, call.splits};
}

template <ElementType kType, int kHeadDim, int kRowWarps, int kKeyWarps>
Status launch_rows(const AttentionArgs& args, Stream stream) {
    const unsigned heads = static_cast<unsigned>(args.call.sequences * args.call.kv_heads);
    const dim3 grid(static_cast<unsigned>(args.plan.row_tiles), static_cast<unsigned>(args.plan.splits), heads);
    const Status status =
        launch(attend<kType, kHeadDim, kRowWarps, kKeyWarps>, grid, dim3(kWarp * kRowWarps * kKeyWarps),
               shared_bytes<kHeadDim>(kRowWarps * kKeyWarps), stream, args);
    if (status != Status::ok || args.plan.splits == 1) {
        return status;
    }
    return launch(combine<kType, kHeadDim>, dim3(static_cast<unsigned>(ceil_div(args.plan.rows, kCombineWarps)), heads),
                  dim3(kWarp * kCombineWarps), 0, stream, args);
}

template <ElementType kType, int kHeadDim>
Status launch_typed(const AttentionArgs& args, Stream stream) {
    switch (args.plan.row_warps) {
        case 1:
            return launch_rows<kType, kHeadDim, 1, 4>(args, stream);
        case 4:
            return launch_rows<kType, kHeadDim, 4, 1>(args, stream);
        default:
            return launch_rows<kType, kHeadDim, 8, 1>(args, stream);
    }
}

Status check(const TreeAttention& call) {
    if (call.sequences < 0 || call.tokens < 0 || call.kv_heads < 1 || call.q_heads < call.kv_heads ||
        call.q_heads % call.kv_heads != 0 || call.slots < 1 || call.capacity < call.tokens || call.capacity < 1 ||
        call.splits < 0 || call.splits > 65535 || static_cast<int64_t>(call.sequences) * call.kv_heads > 65535 ||
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

    AttentionExtents here = extents(call);
    here.multiprocessors = smaller(device::multiprocessors(), kMostMultiprocessors);
    if (here.multiprocessors < 1) {
        return Status::launch_failed;
    }
    AttentionArgs args{call, plan_attention(here), call.scale * kLog2E, nullptr, nullptr};
    args.partial_out = static_cast<float*>(call.workspace);
    args.partial_sum = args.partial_out + partial_rows(extents(call), args.plan) * call.head_dim;
    if (call.type == ElementType::bf16) {
        return call.head_dim == 64 ? launch_typed<ElementType::bf16, 64>(args, stream)
                                   : launch_typed<ElementType::bf16, 128>(args, stream);
    }
    return call.head_dim == 64 ? launch_typed<ElementType::fp16, 64>(args, stream)
                               : launch_typed<ElementType::fp16, 128>(args, stream);
}

}  // namespace ddtree
