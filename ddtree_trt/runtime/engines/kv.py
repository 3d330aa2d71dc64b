"""Key-value caches: how many rows of each slot are committed, and a cache in the host's memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt.errors import EngineError
from ddtree_trt.models.decoder import TransformerDims


class SlotLengths:
    """The number of committed rows of each slot. The object does not own the rows' memory."""

    def __init__(self, slots: int, rows: int) -> None:
        """`rows`: of each slot."""
        self.rows = rows
        self._lengths = [0] * slots

    @property
    def slots(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> Sequence[int]:
        """Committed rows of each slot; `append` and `truncate` change them."""
        return self._lengths

    def check_room(self, slot: int, tokens: int) -> None:
        """Raises EngineError when `tokens` more rows do not fit: a pass would silently write behind the slot."""
        length = self._lengths[slot]
        if length + tokens > self.rows:
            raise EngineError(f"slot {slot} holds {length} of {self.rows} cache rows, {tokens} more do not fit")

    def append(self, slot: int, tokens: int) -> None:
        """Count the rows that a pass has written behind the committed ones as committed."""
        self.check_room(slot, tokens)
        self._lengths[slot] += tokens

    def truncate(self, slot: int, length: int) -> None:
        """Keep the first `length` rows and forget the others. Raises EngineError when the slot holds fewer."""
        if not 0 <= length <= self._lengths[slot]:
            raise EngineError(f"slot {slot} holds {self._lengths[slot]} tokens, cannot keep the first {length}")
        self._lengths[slot] = length


class SlotCache(SlotLengths):
    """One network's cache on the host: a buffer float32 [slots, Hkv, S, D] for the keys and one for the values of each
    layer. Buffers never move: the inference runtime reads and appends in place, compaction moves rows in place."""

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
