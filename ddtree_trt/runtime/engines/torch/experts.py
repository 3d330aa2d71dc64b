"""Mixtures of experts in PyTorch: routing, and the sum over a row's experts.

Shapes depend on the number of rows alone, so that a pass can be captured into a CUDA graph. Nothing is added in an
order that may change."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree_trt.models.decoder import Experts

Swiglu = Callable[[Tensor], Tensor]  # [1, rows, 2·inner] → [1, rows, inner]
# A product of rows [rows, in], grouped by expert, with weights [E, in, out]; `offs` int32 [E] are the ends of groups.
_grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm


def route(h: Tensor, router: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Weights [R, K], falling, and experts int64 [R, K] of rows h [R, H]. The softmax is over all experts, in
    float32."""
    weights, chosen = F.linear(h, router).softmax(-1, dtype=torch.float32).topk(experts.per_token, -1)
    if experts.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(h.dtype), chosen


def mixture(h: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, experts: Experts, swiglu: Swiglu) -> Tensor:
    """The mixture over rows h [N, T, H]; router [E, H], gate_up [E·2·inner, H] and down [E·H, inner]."""
    rows = h.flatten(0, 1)
    weights, chosen = route(rows, router, experts)
    both, back = (part.unflatten(0, (experts.count, -1)).transpose(1, 2) for part in (gate_up, down))
    mix = mix_grouped if has_grouped_products(h) else mix_all
    return mix(rows, weights, chosen, both, back, swiglu).view_as(h)


def has_grouped_products(h: Tensor) -> bool:
    """Whether products by group have a kernel. On GPUs before Hopper, and in other types than bf16, PyTorch has a loop,
    which waits for the host and cannot be captured."""
    if not h.is_cuda:
        return True
    return h.dtype == torch.bfloat16 and torch.cuda.get_device_capability(h.device) >= (9, 0)


def mix_grouped(h: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, swiglu: Swiglu) -> Tensor:
    """Rows h [R, H] through the experts they chose, [R, K] of each row, and added by weight; projections are
    [E, in, out]. Of the weights only those of chosen experts are read."""
    each = chosen.shape[1]
    ids, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(len(gate_up), device=h.device), right=True).to(torch.int32)
    inner = swiglu(_grouped(h[order // each], gate_up, offs=ends)[None])[0]
    found = _grouped(inner, down, offs=ends)
    results = torch.empty_like(found)
    results[order] = found
    return (results.unflatten(0, (-1, each)) * weights[..., None]).sum(1)


def mix_all(h: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, swiglu: Swiglu) -> Tensor:
    """The same with every row through every expert, as far as their weights are not 0."""
    share = h.new_zeros(len(h), len(gate_up)).scatter_(1, chosen, weights)  # [R, E]
    inner = swiglu(torch.bmm(h.expand(len(gate_up), -1, -1), gate_up))
    return (torch.bmm(inner, down) * share.t()[..., None]).sum(0)
