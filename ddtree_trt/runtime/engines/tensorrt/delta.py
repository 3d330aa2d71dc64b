"""The states of a hybrid's delta nets in a TensorRT engine, and what its passes keep of their rows for a commit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.device.buffers import StateShapes, aligned
from ddtree_trt.device.cuda_device import Device
from ddtree_trt.runtime.engines.passes import Snapshots


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


def kept_addresses(shapes: StateShapes, rows: int, address: int) -> dict[str, int]:
    """Of outputs of a pass that are inputs of a commit, with room for so many rows."""
    each = aligned(rows * shapes.row_bytes)
    return {names.kept_name(layer): address + layer * each for layer in range(shapes.layers)}
