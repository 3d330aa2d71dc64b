"""Tensors of hybrids as their parts say they are, which is not everywhere how checkpoints have them."""

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.models.decoder import BODY, FINAL_NORM, TransformerDims
from ddtree_trt.models.delta import DeltaNet

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


# Tensors of GGUF whose last rows belong to value heads, several each or one. Columns of "ssm_out" do.
_WIDE = ("attn_qkv", "attn_gate", "ssm_conv1d")
_NARROW = ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")


def from_gguf(part: str, values: Floats, dims: TransformerDims) -> Floats:
    """A tensor of a layer by GGUF's name in our form. llama.cpp's converter has left norms, decays and convolutions as
    ours are, and put value heads in the order of tiles: the first of every key head, then the second of each. Of
    Qwen3-Next it has left them as they were, and two projections interleaved."""
    if dims.delta is None:
        return values
    d = dims.delta
    if part == "attn_q":
        return _by_kind(values, dims.num_heads, (dims.head_dim, dims.head_dim))
    if d.interleaved:
        share = d.value_heads // d.key_heads
        return _by_kind(values, d.key_heads, (share, share)) if part == "ssm_ba" else values
    if part == "ssm_out":
        return np.ascontiguousarray(_by_key_head(values.T, d.value_dim, d).T)
    if part in (*_WIDE, *_NARROW):
        return _by_key_head(values, d.value_dim if part in _WIDE else 1, d)
    return values


def _by_key_head(values: Floats, size: int, d: DeltaNet) -> Floats:
    first = len(values) - d.value_heads * size
    heads = values[first:].reshape(-1, d.key_heads, size, *values.shape[1:])
    return np.concatenate([values[:first], heads.swapaxes(0, 1).reshape(values[first:].shape)])


def _by_kind(values: Floats, heads: int, sizes: tuple[int, ...]) -> Floats:
    """Rows that are so many of each kind for every head, as all rows of the first kind, then of the next."""
    by_head = values.reshape(heads, sum(sizes), -1)
    kinds = np.split(by_head, np.cumsum(sizes[:-1]), axis=1)
    return np.concatenate([kind.reshape(-1, values.shape[-1]) for kind in kinds])
