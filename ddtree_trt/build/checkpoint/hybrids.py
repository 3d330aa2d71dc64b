"""Tensors of hybrids as their parts say they are, which is not everywhere how checkpoints have them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.models.decoder import BODY, FINAL_NORM, TransformerDims

Floats = NDArray[np.float32]

_AROUND_0 = ("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight")


def in_our_form(name: str, values: Floats, dims: TransformerDims) -> Floats:
    """A tensor by its Hugging Face name: norms around 1, decays as −exp(A_log), a convolution as [C, taps], and
    projections whose rows are interleaved by head with those of one kind together, in the order of the dimensions'
    `projected_widths`. Others stay."""
    if dims.delta is None:
        return values
    d, share = dims.delta, dims.delta.value_heads // dims.delta.key_heads
    if name.endswith(_AROUND_0) or name == BODY + FINAL_NORM:
        return values + np.float32(1)
    if name.endswith("A_log"):
        return -np.exp(values)
    if name.endswith("conv1d.weight"):
        return values.reshape(d.channels, d.taps)
    if name.endswith("q_proj.weight"):
        return _by_kind(values, dims.num_heads, (dims.head_dim, dims.head_dim))
    if name.endswith("in_proj_qkvz.weight"):
        return _by_kind(values, d.key_heads, (d.key_dim, d.key_dim, share * d.value_dim, share * d.value_dim))
    if name.endswith("in_proj_ba.weight"):
        return _by_kind(values, d.key_heads, (share, share))
    return values


def _by_kind(values: Floats, heads: int, sizes: tuple[int, ...]) -> Floats:
    """Rows that are so many of each kind for every head, as all rows of the first kind, then of the next."""
    by_head = values.reshape(heads, sum(sizes), -1)
    kinds = np.split(by_head, np.cumsum(sizes[:-1]), axis=1)
    return np.concatenate([kind.reshape(-1, values.shape[-1]) for kind in kinds])
