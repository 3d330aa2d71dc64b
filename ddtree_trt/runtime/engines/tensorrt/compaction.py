"""Commits of a TensorRT engine: accepted rows move to the front, in the cache and the tapped states."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.device.buffers import StateShapes, aligned
from ddtree_trt.device.cuda_device import Device, Upload
from ddtree_trt.device.libraries import io_tensors
from ddtree_trt.runtime.engines.passes import Snapshots
from ddtree_trt.runtime.engines.tensorrt.network import TrtNetwork

_NONE = np.empty(0, np.int32)


class Compaction:
    """Moves accepted rows to the front of the window by the third plan, one captured pass per slot."""

    def __init__(self, network: TrtNetwork, rows: int, uploads: Sequence[Upload], state_bytes: int) -> None:
        """`network` runs the plan on a cache of `rows` rows a slot (S). `uploads`: one for each slot, so that the
        commits of a round need no wait between them. `state_bytes`: of a row's tapped states, M·H."""
        self._network = network
        self._rows = rows
        self._keep_shape = tuple(network.engine.get_tensor_shape(names.KEEP))  # [K], or with our plugin [1, K]
        self._uploads = uploads
        self._state_bytes = state_bytes
        self._advances = names.TAKEN in io_tensors(network.engine)  # whether a commit has to advance states

    def move(
        self, slot: int, past: int, path: NDArray[np.int32], first: int, states: int | None,
        cuts: Mapping[int, Callable[[], None]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Move rows past + path[j] of the slot to past + j in every plane of the cache, and likewise, one by one, rows
        path[j] of the tree's tapped states, at the address `states`, to j. `path` rises. A hybrid's states advance by
        these rows of the pass, from `first` on, and what `cuts` says is done when it has so many of them."""
        if 0 in cuts:
            cuts[0]()
        for start, end, at, keep in windows(past, path, self._keep_shape[-1], self._rows, cuts):
            before = first + int(path[start - 1]) if start else -1
            self._run(slot, at, keep, first + path[start:end], before)
            if end in cuts:
                cuts[end]()
        if states is not None:
            device, size = self._network.shared.device, self._state_bytes
            for row, source in enumerate(path.tolist()):
                if source != row:
                    device.copy(states + row * size, states + source * size, size)

    def _run(
        self, slot: int, past: int, keep: NDArray[np.int32], taken: NDArray[np.int32] = _NONE, before: int = -1
    ) -> None:
        control = {names.PAST_LEN: np.array([past], np.int32), names.KEEP: keep.reshape(self._keep_shape)}
        if self._advances:
            rows = np.full(self._keep_shape, -1, np.int32)
            rows[: len(taken)] = taken
            control |= {names.TAKEN: rows, names.BEFORE: np.array([before], np.int32)}
        self._network.run([slot], self._uploads[slot], control, key=slot)

    def warm_up(self, slot: int) -> None:
        """Do the one-time work of the first call for this slot, which is empty and is left as it is."""
        self._run(slot, 0, np.arange(self._keep_shape[-1], dtype=np.int32))


def windows(
    past: int, path: NDArray[np.int32], size: int, rows: int, cuts: Iterable[int] = ()
) -> Iterator[tuple[int, int, int, NDArray[np.int32]]]:
    """(start, end, past, keep [`size`]) of each execution of the compaction plan: together they move row past + path[j]
    to past + j of a slot with `rows` rows, front to back, each from `start` to `end`, the next of `cuts` at most."""
    bounds = sorted({0, *cuts, len(path)})
    parts = [(s, min(s + size, end)) for begin, end in pairwise(bounds) for s in range(begin, end, size)]
    for start, end in parts:
        moved = path[start:end] - start
        earlier = max(0, past + start + size - rows)
        keep = np.arange(size, dtype=np.int32)
        keep[earlier : earlier + len(moved)] = moved + earlier
        yield start, end, past + start - earlier, keep


class DeltaStates:
    """Layer by layer the states of all slots and their last inputs in device memory, and behind them those that slots
    come back to, slot by slot. `tensors`: inputs and outputs that are states → the first slot's address, and bytes of a
    slot. `snapshots` are by address."""

    def __init__(self, shapes: StateShapes, limits: Limits, device: Device, address: int) -> None:
        slots, self._device = limits.max_batch, device
        self.tensors: dict[str, tuple[int, int]] = {}
        self.snapshots = Snapshots[int](slots, limits.snapshot_every)
        self._live: list[tuple[int, int]] = []  # the same of every layer's two
        for layer in range(shapes.layers):
            for part, size in enumerate((shapes.state_bytes, shapes.past_bytes)):
                self._live.append((address, size))
                self.tensors |= {names.state_names(kind, layer)[part]: (address, size) for kind in ("past", "present")}
                address += aligned(slots * size)
        each = limits.snapshots * shapes.slot_bytes
        self._places = [
            range(start, start + each, shapes.slot_bytes) for start in range(address, address + slots * each, each)
        ]

    def cuts(self, slot: int, length: int, end: int, *, prompt_ends: bool) -> dict[int, Callable[[], None]]:
        """What is to be done when the slot has grown by so many tokens from `length`; see `Snapshots.stops`."""
        stops = self.snapshots.stops(slot, length, end, prompt_ends=prompt_ends)
        return {stop - length: partial(self.keep, slot, stop) for stop in stops}

    def keep(self, slot: int, length: int) -> None:
        """Copy the slot's states, which are of that length, to a place of their own."""
        used = {*self.snapshots.kept(slot)}
        place = next(place for place in self._places[slot] if place not in used)
        self.snapshots.keep(slot, length, place)
        for start, size in self._live:
            self._device.copy(place, start + slot * size, size)
            place += size

    def restore(self, slot: int, length: int) -> None:
        """Go back to the states kept at a length, or to 0, and forget later ones."""
        place = self.snapshots.back_to(slot, length)
        for start, size in self._live:
            if place is None:
                self._device.clear(start + slot * size, size)
            else:
                self._device.copy(start + slot * size, place, size)
                place += size
