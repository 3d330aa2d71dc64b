"""The operations between a layer's matrix products: norms, rotary embedding, SwiGLU.

Our CUDA kernels are one launch each: in a decoding round the time of these operations is that of their launches.
PyTorch computes the same in any precision, and rounds where Hugging Face rounds.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree_trt.models import rotary
from ddtree_trt.models.decoder import TransformerDims


def rotary_tables(dims: TransformerDims, rows: int, device: torch.device) -> Tensor:
    """float32 [2, rows, R], where R elements of a head are rotated: cosines, and sines, negative in the first half."""
    found = rotary.rotary_tables(dims.rotated, dims.rope_theta, rows, dims.rope_scaling)
    cos, sin = map(torch.from_numpy, found)
    return torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1))).to(device)


def rotate(x: Tensor, tables: Tensor, positions: Tensor) -> Tensor:
    """Heads x [..., N, T, heads, D], their first R elements rotated by the tables' angles at positions int [N, T], in
    float32."""
    x, *others = x.tensor_split([tables.shape[-1]], -1)
    cos, sin = (F.embedding(positions, table).unsqueeze(-2) for table in tables)
    turned = torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1).float(), sin)
    return torch.cat((turned, *others), -1) if others[0].shape[-1] else turned


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis; by a weight of float32 in float32, of x's type."""
    return F.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, eps).to(x.dtype)


class Pointwise:
    """Over tensors [N, T, …] of one precision."""

    def __init__(self, *, kernels: bool = False) -> None:
        """`kernels` need `torch.ops.ddtree`, bf16 or fp16, and widths in multiples of 8."""
        self.kernels = kernels

    def add_norm(self, x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + update, its RMS norm), [N, T, H] each; without an update x itself and its norm."""
        if not self.kernels:
            total = x if update is None else x + update
            return total, _norm(total, weight, eps)
        total, normed = x if update is None else torch.empty_like(x), torch.empty_like(x)
        added, into = (None, None) if update is None else (update.flatten(0, 1), total.flatten(0, 1))
        torch.ops.ddtree.add_rms_norm(x.flatten(0, 1), added, weight, eps, into, normed.flatten(0, 1))
        return total, normed

    def split_qkv(
        self, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, tables: Tensor, positions: Tensor, eps: float,
        heads: tuple[int, int],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Queries [N, T, Hq, D], keys and values [N, T, Hkv, D], contiguous, of the fused projection's output
        [N, T, (Hq + 2·Hkv)·D]: heads normed where there are norms [D], queries and keys rotated. `heads`: Hq, Hkv."""
        query_heads, kv_heads = heads
        each = query_heads, kv_heads, kv_heads
        parts = qkv.unflatten(-1, (sum(each), -1))
        # The kernel norms heads too, and rotates all of them.
        if self.kernels and q_norm is not None and k_norm is not None and parts.shape[3] == tables.shape[-1]:
            q, k, v = (parts.new_empty(*parts.shape[:2], h, parts.shape[3]) for h in each)
            rows = [x.flatten(0, 1) for x in (q, k, v)]
            at = positions.to(torch.int32).flatten().contiguous()
            torch.ops.ddtree.split_qkv(parts.flatten(0, 1), q_norm, k_norm, tables, at, eps, *rows)
            return q, k, v
        q, k, v = parts.split(each, 2)
        if q_norm is not None:
            q = _norm(q, q_norm, eps)
        if k_norm is not None:
            k = _norm(k, k_norm, eps)
        q, k = (rotate(x, tables, positions).to(qkv.dtype).contiguous() for x in (q, k))
        return q, k, v.contiguous()

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up, [N, T, inner], of [N, T, 2·inner]."""
        gate, up = gate_up.chunk(2, -1)
        if not self.kernels:
            return F.silu(gate) * up
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        torch.ops.ddtree.swiglu(gate_up.flatten(0, 1), out.flatten(0, 1))
        return out


def math_for(kernels: bool, dims: TransformerDims) -> Pointwise:
    """On the kernels if attention uses them too, all widths are multiples of 8 and norms are of the precision."""
    return Pointwise(kernels=kernels and not dims.delta and dims.hidden_size % 8 == dims.intermediate_size % 8 == 0)
