"""Which engines are exact, and why the others are not.

In an exact engine a row's results have the same bits in every pass, whatever the tree, the other slots and the chunks
of its prompt: greedy text is that of `ar`, token for token. `docs/generation.md` has this as a table.
"""

from __future__ import annotations

from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.manifest import Manifest

EXPERTS = "in a mixture of experts an expert's product depends on how many rows choose it"
PLANS = "TensorRT chooses the order of its sums by the shapes of a plan"
HYBRID = "a hybrid's states are moved by the rows of a path at once, in another order than by single tokens"
RANKS = "a split target's sums over ranks may have another order for passes of another size"
KERNELS = "only on a GPU, in bf16 or fp16 and with heads of 64 or 128, do PyTorch engines run on our kernels"
REASONS = (EXPERTS, PLANS, HYBRID, RANKS, KERNELS)


def why_inexact(manifest: Manifest, *, kernels: bool = False, ranks: int = 1) -> str | None:
    """Why an engine is not exact; None where nothing is known against it. `kernels`: whether an engine in PyTorch runs
    on ours. `ranks`: over which its target is split."""
    dims, backend = manifest.target_dims, BACKENDS[manifest.backend]
    if dims.experts is not None:
        return EXPERTS
    if backend.on_cpu:
        return None
    if backend.plans:
        return PLANS
    if dims.delta is not None:
        return HYBRID
    if ranks > 1:
        return RANKS
    return None if kernels else KERNELS
