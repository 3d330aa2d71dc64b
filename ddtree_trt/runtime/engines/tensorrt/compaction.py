"""Compaction of a verified tree's accepted rows, in the target's cache and in the pass's tapped states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact import tensors as names
from ddtree_trt.device.buffers import CacheShape
from ddtree_trt.device.cuda_device import Device, Upload
from ddtree_trt.plugins.library import KernelLibrary
from ddtree_trt.runtime.engines.tensorrt.network import TrtNetwork


@dataclass(frozen=True)
class TappedStates:
    """The tapped states [T, M·H] of one tree in device memory."""

    address: int
    rows: int  # T
    row_bytes: int


class Compaction(Protocol):
    """Moves accepted rows to the front of the window. It waits for nothing."""

    def move(self, slot: int, past: int, path: NDArray[np.int32], states: TappedStates | None) -> None:
        """Move rows past + path[j] of the slot to past + j in every plane of the cache, and likewise rows path[j] of
        the tree's states to j. `path` rises."""

    def warm_up(self, slot: int) -> None:
        """Do the one-time work of the first call for this slot, which is empty and is left as it is."""


class KernelCompaction:
    """Our kernel: two launches, on the cache and on the states, which it gets as a cache of one plane, slot and
    head."""

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

    def warm_up(self, slot: int) -> None:
        """Does nothing: kernels are loaded with their library."""


class PlanCompaction:
    """The third plan of an engine of native attention, one captured pass per slot; the states' rows are copied one by
    one, which the host can do since it knows the path."""

    def __init__(self, network: TrtNetwork, shape: CacheShape, uploads: Sequence[Upload]) -> None:
        """`network` runs the plan on the cache of this `shape`; `uploads` as for KernelCompaction."""
        self._network = network
        self._rows = shape.rows
        self._window = int(network.engine.get_tensor_shape(names.KEEP)[0])  # K of the plan
        self._uploads = uploads

    def move(self, slot: int, past: int, path: NDArray[np.int32], states: TappedStates | None) -> None:
        for start, keep in windows(past, path, self._window, self._rows):
            self._run(slot, start, keep)
        if states is not None:
            device = self._network.shared.device
            for row, source in enumerate(path.tolist()):
                if source != row:
                    size = states.row_bytes
                    device.copy(states.address + row * size, states.address + source * size, size)

    def _run(self, slot: int, past: int, keep: NDArray[np.int32]) -> None:
        control = {names.PAST_LEN: np.array([past], np.int32), names.KEEP: keep}
        shapes = {name: array.shape for name, array in control.items()}
        self._network.run([slot], 0, shapes, self._uploads[slot].send(control), key="move")

    def warm_up(self, slot: int) -> None:
        self._run(slot, 0, np.arange(self._window, dtype=np.int32))


def windows(past: int, path: NDArray[np.int32], size: int, rows: int) -> Iterator[tuple[int, NDArray[np.int32]]]:
    """(past, keep [`size`]) of each execution of the compaction plan that together moves row past + path[j] to past + j
    of a slot with `rows` rows: front to back, and none ends behind the slot. Of a row that stays, keep[j] is j."""
    for start in range(0, len(path), size):
        moved = path[start : start + size] - start
        earlier = max(0, past + start + size - rows)
        keep = np.arange(size, dtype=np.int32)
        keep[earlier : earlier + len(moved)] = moved + earlier
        yield past + start - earlier, keep
