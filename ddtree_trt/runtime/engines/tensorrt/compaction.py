"""Compaction of a verified tree's accepted rows, in the target's cache and in the pass's tapped states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.device.buffers import CacheShape
from ddtree_trt.device.cuda_device import Device, Upload
from ddtree_trt.plugins.library import KernelLibrary


@dataclass(frozen=True)
class TappedStates:
    """The tapped states [T, M·H] of one tree in device memory."""

    address: int
    rows: int  # T
    row_bytes: int


class Compaction:
    """The compaction kernel on one cache. It waits for nothing."""

    def __init__(
        self, kernels: KernelLibrary, device: Device, shape: CacheShape, address: int, uploads: Sequence[Upload]
    ) -> None:
        """`shape` of the cache at `address`. `uploads`: one for each slot, so that the commits of a round need no wait
        between them."""
        self._kernels = kernels
        self._device = device
        self._shape = shape
        self._address = address
        self._uploads = uploads

    def move(self, slot: int, past: int, path: NDArray[np.int32], states: TappedStates | None) -> None:
        """Move rows past + path[j] of the slot to past + j in every plane of the cache, and likewise the tree's states,
        which the kernel gets as a cache of one plane, slot and head."""
        at = self._uploads[slot].send(
            {
                "slot": np.array([slot], np.int32),
                "past": np.array([past], np.int32),
                "count": np.array([len(path)], np.int32),
                "zero": np.zeros(1, np.int32),
                "keep": path.astype(np.int32, copy=False),
            }
        )
        shape = self._shape
        kept = {"keep": at["keep"], "keep_count": at["count"], "max_keep": len(path)}
        self._launch(
            **kept,
            cache=self._address,
            slot_ids=at["slot"],
            past_len=at["past"],
            planes=shape.planes,
            slots=shape.stored_slots,
            kv_heads=shape.kv_heads,
            capacity=shape.rows,
            row_bytes=shape.row_bytes,
        )
        if states is not None:
            self._launch(
                **kept,
                cache=states.address,
                slot_ids=at["zero"],
                past_len=at["zero"],
                planes=1,
                slots=1,
                kv_heads=1,
                capacity=states.rows,
                row_bytes=states.row_bytes,
            )

    def _launch(self, **arguments: Any) -> None:
        self._kernels.launch("compact", self._device.stream, sequences=1, **arguments)
