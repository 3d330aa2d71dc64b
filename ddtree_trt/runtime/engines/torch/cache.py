"""The key-value cache of one network: one tensor, in which every slot has a fixed number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.runtime.engines.kv import SlotLengths
from ddtree_trt.runtime.engines.torch.attention import Place


class DeviceCache(SlotLengths):
    """Slots in device memory at fixed addresses. The host counts their rows; passes get the counts as data
    (`Place`)."""

    def __init__(
        self, dims: TransformerDims, slots: int, rows: int, dtype: torch.dtype, device: torch.device, *, kernels: bool
    ) -> None:
        """`kernels`: rows are moved by `torch.ops.ddtree`, else by PyTorch."""
        super().__init__(slots, rows)
        self._kernels = kernels
        # Zeros: rows that were never written are multiplied by weights of zero, and a NaN in them would remain NaN.
        shape = (2 * dims.num_layers, slots, dims.num_kv_heads, rows, dims.head_dim)
        self.slab = torch.zeros(shape, dtype=dtype, device=device)  # [planes, slots, Hkv, S, D]: key, value by layer

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values [slots, Hkv, S, D] of a layer."""
        return self.slab[2 * index], self.slab[2 * index + 1]

    def write(self, keys_values: Tensor, place: Place, rows: Tensor) -> None:
        """Store keys_values [layers, 2, N, C, Hkv, D] at rows int [N, C] of the sequences' slots, in every layer."""
        values = keys_values.flatten(0, 1).permute(1, 2, 0, 3, 4)  # [N, C, planes, Hkv, D]
        self.slab[:, place.slots.long()[:, None], :, rows.long()] = values

    def compact(self, slots: Tensor, past: Tensor, keep: Tensor, count: Tensor) -> None:
        """Move rows past + keep[j] of each sequence's slot to past + j in every plane. Committed lengths stay as they
        are.

        slots, past and count are int32 [N], keep int32 [N, M], strictly rising; its first `count` columns are moved.
        """
        if self._kernels:
            torch.ops.ddtree.compact(self.slab, slots, past, keep, count)
            return
        column = torch.arange(keep.shape[1], device=keep.device)
        rows = past.long()[:, None] + column
        sources = past.long()[:, None] + keep.long()
        sources = torch.where(column < count[:, None], sources, rows).clamp(max=self.rows - 1)
        slot = slots.long()[:, None]
        self.slab[:, slot, :, rows.clamp(max=self.rows - 1)] = self.slab[:, slot, :, sources]
