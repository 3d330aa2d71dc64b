"""The key-value cache of one network on the host: one buffer per layer and part, a slot in each row.

Buffers are float32 [slots, Hkv, S, D] and never move: the inference runtime reads and appends in place, compaction
moves rows in place.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt.errors import EngineError
from ddtree_trt.models.decoder import TransformerDims


class SlotLengths:
    """How many rows of each slot are committed, whatever memory they lie in."""

    def __init__(self, slots: int, rows: int) -> None:
        self.rows = rows
        self.lengths = [0] * slots

    @property
    def slots(self) -> int:
        return len(self.lengths)

    def check_room(self, slot: int, tokens: int) -> None:
        """Raises EngineError when `tokens` more rows do not fit: a pass would write past the slot silently."""
        if self.lengths[slot] + tokens > self.rows:
            raise EngineError(
                f"slot {slot} holds {self.lengths[slot]} of {self.rows} cache rows, {tokens} more do not fit"
            )

    def append(self, slot: int, tokens: int) -> None:
        """Count rows that a pass has written behind the committed ones."""
        self.check_room(slot, tokens)
        self.lengths[slot] += tokens

    def truncate(self, slot: int, length: int) -> None:
        if not 0 <= length <= self.lengths[slot]:
            raise EngineError(f"slot {slot} holds {self.lengths[slot]} tokens, cannot keep the first {length}")
        self.lengths[slot] = length


class SlotCache(SlotLengths):
    def __init__(self, dims: TransformerDims, slots: int, rows: int) -> None:
        super().__init__(slots, rows)
        shape = (slots, dims.num_kv_heads, rows, dims.head_dim)
        # np.zeros maps pages lazily: a slot costs memory only once tokens are written to it.
        self.buffers = [np.zeros(shape, np.float32) for _ in range(2 * dims.num_layers)]
        self._heads = dims.num_kv_heads
        self._row_bytes = dims.head_dim * 4
        self._bases = [np.array([b[s].ctypes.data for b in self.buffers], np.uint64) for s in range(slots)]

    def compact(self, slot: int, path: NDArray[np.int32]) -> None:
        """Move the rows length + path[j] to length + j in every layer, then count them as committed."""
        start = self.lengths[slot]
        if path[-1] != len(path) - 1:
            stride = self.rows * self._row_bytes
            _native.compact_rows(self._bases[slot], self._heads, stride, self._row_bytes, start, path, self.rows)
        self.append(slot, len(path))
