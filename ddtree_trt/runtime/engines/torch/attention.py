"""Attention of T new rows over a slotted cache and themselves.

Our CUDA kernels compute it, through `torch.ops.ddtree`, in every pass, so that a row has the same bits in all of them.
PyTorch's scaled_dot_product_attention under a mask runs everywhere and is the reference of the kernels; on a GPU it
serves precisions, head sizes and windows that have no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree_trt.device.buffers import slot_numbers
from ddtree_trt.errors import MissingDependency
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.plugins import HEAD_DIMS, MaskMode
from ddtree_trt.plugins.library import BUILD_HINT, TORCH, find
from ddtree_trt.runtime.engines.base import VerifyRequest
from ddtree_trt.runtime.engines.passes import SlotLengths, mask_words, pad_trees
from ddtree_trt.runtime.engines.torch.delta import States


class DeviceCache(SlotLengths):
    """Slots in device memory at fixed addresses. The host counts their rows, of which passes get the counts."""

    states: States | None

    def __init__(
        self, dims: TransformerDims, slots: int, rows: int, dtype: torch.dtype, device: torch.device, *, kernels: bool,
        states: States | None = None,
    ) -> None:  # fmt: skip
        """`kernels`: rows are moved by `torch.ops.ddtree`, else by PyTorch. `states` of a hybrid's delta-net layers."""
        super().__init__(slots, rows, states)
        self.busy: Container[int] = ()  # slots in rounds on the device, which may hold more rows than the host counts
        self._kernels = kernels
        self._number = {layer: n for n, layer in enumerate(dims.attention_layers)}
        # Zeros: rows that were never written are multiplied by weights of zero, and a NaN in them would remain NaN.
        shape = (2 * len(self._number), slots, dims.num_kv_heads, rows, dims.head_dim)
        self.slab = torch.zeros(shape, dtype=dtype, device=device)  # [planes, slots, Hkv, S, D]: key, value by layer

    def spare(self, taken: Container[int], tokens: int) -> list[int]:
        """Slots that a pass may be padded with which writes so many rows behind those `taken`: nobody reads what it
        writes behind theirs. The shortest first."""
        lengths, most = self.lengths, self.rows - tokens
        free = (i for i, length in enumerate(lengths) if length <= most and i not in taken and i not in self.busy)
        return sorted(free, key=lengths.__getitem__)

    def padding(self, taken: Collection[int], tokens: int) -> list[int]:
        """Free slots that make those `taken` one of the few numbers that graphs are for; none on a CPU."""
        if not self.slab.is_cuda:
            return []
        size = next(n for n in slot_numbers(self.slots) if n >= len(taken))
        return self.spare(taken, tokens)[: size - len(taken)]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values [slots, Hkv, S, D] of a layer."""
        number = self._number[index]
        return self.slab[2 * number], self.slab[2 * number + 1]

    def place(self, requests: Sequence[VerifyRequest]) -> tuple[Place, Tensor, Tensor]:
        """Where the rows of a pass over trees are, padded to the longest; their token ids and positions int32 [N, T].
        Raises EngineError where they do not fit."""
        tokens = max(len(request.tree) for request in requests)
        for request in requests:
            self.check_room(request.slot, tokens)
        padded = pad_trees(requests, self.lengths, tokens, mask_words(tokens))
        arrays = padded.slot_ids, padded.past_len, padded.tree_mask, padded.token_ids, padded.positions
        slots, past, mask, ids, positions = (torch.from_numpy(array).to(self.slab.device) for array in arrays)
        return Place(slots, past, mask), ids, positions

    def write(self, keys_values: Tensor, place: Place, rows: Tensor) -> None:
        """Store keys_values [layers, 2, N, C, Hkv, D] at rows int [N, C] of the sequences' slots, in every layer."""
        values = keys_values.flatten(0, 1).permute(1, 2, 0, 3, 4)  # [N, C, planes, Hkv, D]
        self.slab[:, place.slots.long()[:, None], :, rows.long()] = values

    def compact(self, slots: Tensor, past: Tensor, keep: Tensor, count: Tensor) -> None:
        """Move rows past + keep[j] of each sequence's slot to past + j in every plane; lengths stay as they are. slots,
        past and count are int32 [N], keep int32 [N, M], strictly rising; its first `count` columns are moved."""
        if self._kernels:
            torch.ops.ddtree.compact(self.slab, slots, past, keep, count)
            return
        column = torch.arange(keep.shape[1], device=keep.device)
        rows = past.long()[:, None] + column
        sources = past.long()[:, None] + keep.long()
        sources = torch.where(column < count[:, None], sources, rows).clamp(max=self.rows - 1)
        slot = slots.long()[:, None]
        self.slab[:, slot, :, rows.clamp(max=self.rows - 1)] = self.slab[:, slot, :, sources]


OPERATORS = (  # of torch.ops.ddtree, as cpp_plugins/torch/ops.cpp registers them
    *("attention_workspace_bytes", "tree_attention", "build_tree", "packed_mask", "choose", "commit", "compact"),
    *("draft_top", "add_rms_norm", "split_qkv", "delta_tree", "delta_commit", "swiglu"),
)


@dataclass(frozen=True)
class Place:
    """The slots and offsets at which a pass writes its rows. All of it is device data: lengths are never shapes."""

    slots: Tensor  # int32 [N]
    past: Tensor  # int32 [N]: committed rows of each slot
    mask: Tensor | None = None  # int32 [N, T, W]: ancestor-or-self bits, for mode TREE
    parents: Tensor | None = None  # int32 [N, T], −1 at roots and padding: likewise, in hybrids


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def attention_for(device: torch.device, dtype: torch.dtype, head_dim: int, scratch: Callable[[], Tensor]) -> Attention:
    """The fastest attention for these. Raises MissingDependency where it is our kernels', which are not built."""
    if has_kernels(device, dtype) and head_dim in HEAD_DIMS:
        load_operators()
        return Attention(scratch())
    return Attention()


def scratch_memory(size: int, device: torch.device) -> Callable[[], Tensor]:
    """The kernels' scratch memory of a whole engine, uint8 [size], allocated when it is first asked for: passes follow
    each other on one stream, so that it serves all. For `size` see `memory.attention_workspace_bytes`."""
    return cache(lambda: torch.empty(max(size, 1), dtype=torch.uint8, device=device))


def load_operators() -> None:
    """Load `torch.ops.ddtree`. Raises MissingDependency when the library is not built or out of date."""
    if not hasattr(torch.ops.ddtree, "tree_attention"):
        path = find(TORCH)
        torch.ops.load_library(str(path))
        if missing := [name for name in OPERATORS if not hasattr(torch.ops.ddtree, name)]:
            raise MissingDependency(f"native library {path} is older than this version: no {missing[0]}; {BUILD_HINT}")


class Attention:
    """Attention over a slotted cache: by our kernels, else in PyTorch under a mask: over rows that a window reaches, or
    on a CPU over the rows in use, or on a GPU, where reading their number would need a wait, over the whole slot."""

    def __init__(self, scratch: Tensor | None = None) -> None:
        """With `scratch` passes run on our kernels: `torch.ops.ddtree` must be loaded."""
        self.kernels = scratch is not None
        self._scratch = scratch

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, place: Place, mode: MaskMode,
        scale: float, window: int = 0,
    ) -> Tensor:  # fmt: skip
        """Append keys and values [N, T, Hkv, D] to caches [slots, Hkv, S, D] and attend for q [N, T, Hq, D]:
        [N, T, Hq, D]. All contiguous and of one type. With a `window` a row sees keys nearer than so many positions."""
        past, tokens = place.past, q.shape[1]
        if self._scratch is None or window:
            slots = place.slots.long()
            rows = past.long()[:, None] + torch.arange(tokens, device=q.device)  # [N, T]
            cache_k[slots[:, None], :, rows] = k
            cache_v[slots[:, None], :, rows] = v
            width = cache_k.shape[2] if q.is_cuda else int(past.max()) + tokens
            if window and window - 1 + tokens < width:
                seen = rows[:, :1] + torch.arange(1 - window, tokens, device=q.device)  # [N, R], below 0 hidden
                keys, values = (x[slots[:, None], :, seen.clamp(min=0)].transpose(1, 2) for x in (cache_k, cache_v))
            else:
                seen = torch.arange(width, device=q.device)[None]
                # A single slot on a CPU is read where it is.
                taken = slice(int(slots[0]), int(slots[0]) + 1) if len(slots) == 1 and not q.is_cuda else slots
                keys, values = cache_k[taken, :, :width], cache_v[taken, :, :width]
            mask = _visible(place, mode, tokens, seen, window)[:, None]
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=True
            )
            return out.transpose(1, 2).contiguous()
        out, tree = torch.empty_like(q), place.mask if mode is MaskMode.TREE else None
        torch.ops.ddtree.tree_attention(
            q, k, v, cache_k, cache_v, place.slots, past, tree, int(mode), scale, out, self._scratch, 0
        )
        return out


def _visible(place: Place, mode: MaskMode, tokens: int, rows: Tensor, window: int) -> Tensor:
    """bool [N, T, R]: which of these rows int [N or 1, R] of its slot each new row sees; none below 0."""
    column = torch.arange(tokens, device=place.past.device)[:, None]
    new = rows[:, None] - place.past.long()[:, None, None]  # [N, 1, R], past < 0
    seen = (new < tokens if mode is MaskMode.NONE else new <= column).expand(-1, tokens, -1) & (rows >= 0)[:, None]
    if mode is MaskMode.TREE:
        assert place.mask is not None, "a tree has a mask"
        at = new.clamp(0, tokens - 1).expand_as(seen)
        seen = seen & ((new < 0) | (place.mask.gather(2, at // 32) >> (at % 32) & 1).bool())
    return seen & ((new - column).abs() < window) if window else seen
