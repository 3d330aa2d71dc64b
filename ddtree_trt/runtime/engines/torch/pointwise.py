"""The operations between a layer's matrix products: norms, rotary embedding, SwiGLU.

`KernelMath` is our CUDA kernels, one launch each: in a decoding round the time of these operations is that of their
launches. `PlainMath` computes the same in PyTorch, in any precision, and rounds where Hugging Face rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree_trt.models import rotary
from ddtree_trt.models.decoder import TransformerDims


def rotary_tables(dims: TransformerDims, rows: int, device: torch.device) -> Tensor:
    """float32 [2, rows, D]: cosines, and sines that are negative in the first half."""
    found = rotary.rotary_tables(dims.head_dim, dims.rope_theta, rows, dims.rope_scaling)
    cos, sin = map(torch.from_numpy, found)
    return torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1))).to(device)


def norm_heads(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The RMS norm of every head of x [..., D] by a weight [D]; x itself where the network has none."""
    return x if weight is None else F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x: Tensor, tables: Tensor, positions: Tensor) -> Tensor:
    """Heads x [..., N, T, heads, D] rotated by the tables' angles at positions int [N, T], in float32."""
    cos, sin = (F.embedding(positions, table).unsqueeze(-2) for table in tables)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1).float(), sin)


class PlainMath:
    """PyTorch's operators, on tensors of one precision."""

    def add_norm(self, x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + update, its RMS norm), [N, T, H] each; without an update x itself and its norm."""
        total = x if update is None else x + update
        return total, F.rms_norm(total, (total.shape[-1],), weight, eps)

    def split_qkv(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        tables: Tensor,
        positions: Tensor,
        eps: float,
        heads: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, T, Hq, D], keys and values [N, T, Hkv, D], contiguous, of the fused projection's output
        [N, T, (Hq + 2·Hkv)·D]: heads normed where there are norms [D], queries and keys rotated. `heads` is Hq."""
        parts = qkv.unflatten(-1, (-1, tables.shape[-1]))
        kv_heads = (parts.shape[2] - heads) // 2
        q, k, v = parts.split([heads, kv_heads, kv_heads], 2)
        rotated = (rotate(norm_heads(x, w, eps), tables, positions) for x, w in ((q, q_norm), (k, k_norm)))
        q, k = (x.to(qkv.dtype).contiguous() for x in rotated)
        return q, k, v.contiguous()

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up, [N, T, inner], of [N, T, 2·inner]."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up


class KernelMath(PlainMath):
    """Our kernels, over the N·T rows of a pass. Needs `torch.ops.ddtree`, bf16 or fp16, and widths in multiples of 8.
    The kernel that splits queries, keys and values norms heads too: without those norms PyTorch splits."""

    def add_norm(self, x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed = torch.empty_like(x)
        total = x if update is None else torch.empty_like(x)
        flat, added = x.flatten(0, 1), None if update is None else update.flatten(0, 1)
        into = None if update is None else total.flatten(0, 1)
        torch.ops.ddtree.add_rms_norm(flat, added, weight, eps, into, normed.flatten(0, 1))
        return total, normed

    def split_qkv(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        tables: Tensor,
        positions: Tensor,
        eps: float,
        heads: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if q_norm is None or k_norm is None:
            return super().split_qkv(qkv, q_norm, k_norm, tables, positions, eps, heads)
        size = q_norm.shape[0]
        parts = qkv.view(*qkv.shape[:2], -1, size)
        kv_heads = (parts.shape[2] - heads) // 2
        q, k, v = (parts.new_empty(*qkv.shape[:2], h, size) for h in (heads, kv_heads, kv_heads))
        rows = [x.flatten(0, 1) for x in (q, k, v)]
        at = positions.to(torch.int32).flatten().contiguous()
        torch.ops.ddtree.split_qkv(parts.flatten(0, 1), q_norm, k_norm, tables, at, eps, *rows)
        return q, k, v

    def swiglu(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(*gate_up.shape[:2], gate_up.shape[2] // 2)
        torch.ops.ddtree.swiglu(gate_up.flatten(0, 1), out.flatten(0, 1))
        return out


def math_for(kernels: bool, *dims: TransformerDims) -> PlainMath:
    """`KernelMath` if attention uses kernels too and all widths are multiples of 8, else `PlainMath`."""
    widths = [w for d in dims for w in (d.hidden_size, d.intermediate_size)]
    return KernelMath() if kernels and not any(w % 8 for w in widths) else PlainMath()
