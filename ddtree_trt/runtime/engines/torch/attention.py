"""Attention of T new rows over a slotted cache and themselves.

- `KernelAttention`: our CUDA kernels, through `torch.ops.ddtree`; where flash-attn works (`flash.py`), it computes the
  passes that have no tree.
- `Attention`: PyTorch's scaled_dot_product_attention under a mask. It runs everywhere, and is the reference of the
  kernels; on a GPU it serves precisions and head sizes that have no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree_trt.errors import MissingDependency
from ddtree_trt.plugins import HEAD_DIMS, MaskMode
from ddtree_trt.plugins.library import BUILD_HINT, TORCH, find
from ddtree_trt.plugins.operators import OPERATORS
from ddtree_trt.runtime.engines.torch.flash import Flash, find_flash


@dataclass(frozen=True)
class Place:
    """The slots and offsets at which a pass writes its rows. All of it is device data: lengths are never shapes."""

    slots: Tensor  # int32 [N]
    past: Tensor  # int32 [N]: committed rows of each slot
    mask: Tensor | None = None  # int32 [N, T, W]: ancestor-or-self bits, for mode TREE


def attention_for(device: torch.device, dtype: torch.dtype, head_dim: int, scratch: Scratch) -> Attention:
    """The fastest attention for this device, type and head size.

    Raises MissingDependency where kernels exist for these and are not built, and the errors of `find_flash`.
    """
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and head_dim in HEAD_DIMS:
        load_operators()
        return KernelAttention(scratch, find_flash(device, dtype, head_dim))
    return Attention()


class Scratch:
    """The kernels' scratch memory of a whole engine: passes follow each other on one stream, so one buffer serves every
    layer of every pass of both networks. It is allocated at its first use and keeps its address."""

    def __init__(self, size: int, device: torch.device) -> None:
        """`size` bytes, enough for the largest pass: `memory.attention_workspace_bytes`."""
        self.size = size
        self._device = device

    @cached_property
    def memory(self) -> Tensor:
        """uint8 [size], one byte at least."""
        return torch.empty(max(self.size, 1), dtype=torch.uint8, device=self._device)


def load_operators() -> None:
    """Load `torch.ops.ddtree`. Raises MissingDependency when the library is not built or out of date."""
    if not hasattr(torch.ops.ddtree, "tree_attention"):
        path = find(TORCH)
        torch.ops.load_library(str(path))
        if missing := [name for name in OPERATORS if not hasattr(torch.ops.ddtree, name)]:
            raise MissingDependency(f"native library {path} is older than this version: no {missing[0]}; {BUILD_HINT}")


class Attention:
    """PyTorch's attention under a mask: on a CPU over the rows in use; on a GPU, where reading their number would need
    a wait, over the whole slot."""

    kernels = False  # whether `torch.ops.ddtree` works on its device

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache_k: Tensor,
        cache_v: Tensor,
        place: Place,
        mode: MaskMode,
        scale: float,
        window: int = 0,
    ) -> Tensor:
        """Append keys and values [N, T, Hkv, D] to caches [slots, Hkv, S, D] and attend for q [N, T, Hq, D]:
        [N, T, Hq, D]. All contiguous and of one type. With a `window` a row sees keys less than so many positions
        away."""
        slots, tokens = place.slots.long(), q.shape[1]
        column = torch.arange(tokens, device=q.device)
        rows = place.past.long()[:, None] + column  # [N, T]
        cache_k[slots[:, None], :, rows] = k
        cache_v[slots[:, None], :, rows] = v
        width = cache_k.shape[2] if q.is_cuda else int(place.past.max()) + tokens
        seen = _visible(place, mode, tokens, width, window)[:, None]
        if len(slots) == 1 and not q.is_cuda:
            slot = int(slots[0])
            keys, values = cache_k[slot : slot + 1, :, :width], cache_v[slot : slot + 1, :, :width]
        else:
            keys, values = cache_k[slots, :, :width], cache_v[slots, :, :width]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=seen, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous()


class KernelAttention(Attention):
    """Our kernels, and `flash` for passes without a tree if it is given."""

    kernels = True

    def __init__(self, scratch: Scratch, flash: Flash | None = None) -> None:
        """`torch.ops.ddtree` must be loaded."""
        self._scratch = scratch.memory
        self._flash = flash

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache_k: Tensor,
        cache_v: Tensor,
        place: Place,
        mode: MaskMode,
        scale: float,
        window: int = 0,
    ) -> Tensor:
        if window:  # the kernels have none, and flash-attn's has no bound on the rows behind
            return super().__call__(q, k, v, cache_k, cache_v, place, mode, scale, window)
        if mode is not MaskMode.TREE and self._flash is not None:
            return self._flash(
                q,
                cache_k.transpose(1, 2),
                cache_v.transpose(1, 2),
                k,
                v,
                cache_seqlens=place.past,
                cache_batch_idx=place.slots,
                softmax_scale=scale,
                causal=mode is MaskMode.CAUSAL,
            )
        mask = place.mask if mode is MaskMode.TREE else None
        out = torch.empty_like(q)
        torch.ops.ddtree.tree_attention(
            q, k, v, cache_k, cache_v, place.slots, place.past, mask, int(mode), scale, out, self._scratch, 0
        )
        return out


def _visible(place: Place, mode: MaskMode, tokens: int, width: int, window: int) -> Tensor:
    """bool [N, T, width]: the rows of its slot that each new row sees."""
    past = place.past.long()
    column = torch.arange(tokens, device=past.device)
    if mode is MaskMode.NONE:
        own = torch.ones(1, tokens, tokens, dtype=torch.bool, device=past.device)
    else:
        own = (column <= column[:, None])[None]
        if mode is MaskMode.TREE:
            assert place.mask is not None, "a tree has a mask"
            own = own & ((place.mask[:, :, column // 32] >> (column % 32)) & 1).bool()
    row = torch.arange(width, device=past.device)
    new = row - past[:, None]  # [N, width]: column of a row among the new ones
    inside = (new >= 0) & (new < tokens)
    of_new = own.expand(len(past), -1, -1).gather(2, new.clamp(0, tokens - 1)[:, None].expand(-1, tokens, -1))
    seen = (new < 0)[:, None] | (inside[:, None] & of_new)
    if window:
        seen &= (new[:, None] - column[:, None]).abs() < window
    return seen
