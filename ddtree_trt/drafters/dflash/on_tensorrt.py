"""The DFlash drafter of the TensorRT engine: tapped states stay on the device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.device import buffers
from ddtree_trt.device.buffers import Rows, context_steps, draft_results
from ddtree_trt.device.cuda_device import Upload
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.candidates import Bilinear, Marginals
from ddtree_trt.runtime.engines.base import Draft, DraftRequest
from ddtree_trt.runtime.engines.drafters import Drafter
from ddtree_trt.runtime.engines.passes import SlotLengths
from ddtree_trt.runtime.engines.tensorrt.network import TrtNetwork
from ddtree_trt.runtime.engines.tensorrt.opening import Loaded


@dataclass
class _Known:
    """The tapped states of a slot in its ring: those of rows first … end − 1."""

    first: int = 0
    end: int = 0  # committed tokens the drafter knows


class BlockDrafter(Drafter):
    """One pass over [bonus, MASK × L] of every slot, conditioned on the tapped target states of every committed token.

    The drafter's cache holds `cache.lengths` context rows of a slot. At most one block of further states waits in the
    slot's ring: more, such as a prompt's, are processed at once. All slots of a pass have equally many context rows,
    so a slot with fewer new ones repeats rows that its cache holds, which writes the same values.
    """

    def __init__(
        self, manifest: Manifest, loaded: Loaded, network: TrtNetwork, upload: Upload, host_results: NDArray[np.uint8]
    ) -> None:
        """It runs `network`, with control data in `upload` and drafts in `host_results`."""
        limits, at = manifest.limits, loaded.addresses
        self.network = network
        self._device = loaded.device
        self._kind = manifest.drafting
        self._dims: DFlashDims = self._kind.dims
        self._states = at[buffers.STATES]  # [slots, ring rows, M·H]
        self._context = at[buffers.CONTEXT]  # [N, C, M·H], the graph's input
        self._results_at = at[buffers.RESULTS]  # the graph's outputs, as `draft_results` places them
        self._host_results = host_results
        self._upload = upload
        self._candidates = loaded.candidates
        self._rows = Rows.of(self._dims.block_size, limits)
        self._state_bytes = self._dims.taps_width * PRECISIONS[manifest.precision].value_bytes
        self.cache = SlotLengths(limits.max_batch, limits.cache_rows)
        self._known = [_Known() for _ in range(limits.max_batch)]
        self._steps = context_steps(self._dims.block_size)

    def context_length(self, slot: int) -> int:
        return self._known[slot].end

    def append_context(self, slot: int, token_ids: NDArray[np.int64], states: int) -> None:
        """Take tokens [m] committed behind the known ones, with tapped states [m, M·H] at the address `states`."""
        known, size, rows = self._known[slot], self._state_bytes, len(token_ids)
        for start in range(0, rows, self._rows.chunk):
            piece = min(self._rows.chunk, rows - start)
            source = states + start * size
            for address, count in self._ring_pieces(slot, known.end, piece):
                self._device.copy(address, source, count * size)
                source += count * size
            known.end += piece
            known.first = max(known.first, known.end - self._rows.waiting)
            while self._waiting(slot) > self._dims.block_size:
                self._pass([slot], min(self._waiting(slot), self._rows.chunk), [0])

    def truncate(self, slot: int, length: int) -> None:
        known = self._known[slot]
        known.end = min(known.end, length)
        known.first = min(known.first, known.end)
        self.cache.truncate(slot, min(self.cache.lengths[slot], known.end))

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One pass for all requests, and another for each slot with fewer known rows than that pass has per slot."""
        wanted = max(max(self._waiting(r.slot) for r in requests), 1)
        common = next(c for c in self._steps if c >= wanted)
        groups: dict[int, list[DraftRequest]] = {}
        for request in requests:
            known = self._known[request.slot]
            held = known.end - known.first
            if not held:
                raise EngineError(f"slot {request.slot} has no target states to draft from")
            rows = common if held >= common else max(self._waiting(request.slot), 1)
            groups.setdefault(rows, []).append(request)
        drafts: dict[int, Draft] = {}
        for rows, group in groups.items():
            slots, bonus = [r.slot for r in group], [r.bonus_token for r in group]
            drafts |= self._fetch(group, self._pass(slots, rows, bonus, capture=rows in self._steps))
        return [drafts[r.slot] for r in requests]

    def warm_up(self, slot: int, budget: int) -> None:
        """Capture passes of all numbers of context rows that the slot has states for; K is always the same."""
        known = self._known[slot]
        for rows in self._steps:
            if rows <= known.end - known.first:
                self._pass([slot], rows, [0], capture=True)

    def _waiting(self, slot: int) -> int:
        return self._known[slot].end - self.cache.lengths[slot]

    def _ring_pieces(self, slot: int, first: int, rows: int) -> Iterator[tuple[int, int]]:
        """(address, rows) of each contiguous piece of the states of rows first … first + rows − 1."""
        ring = self._rows.waiting
        base = self._states + slot * ring * self._state_bytes
        while rows:
            at = first % ring
            count = min(rows, ring - at)
            yield base + at * self._state_bytes, count
            first, rows = first + count, rows - count

    def _pass(
        self, slots: Sequence[int], rows: int, bonus_tokens: Sequence[int], *, capture: bool = False
    ) -> Sequence[int]:
        """Process `rows` context rows of every slot, C, the last known ones, or the oldest waiting ones when more wait,
        and run the block behind them; returns the pass's slots. An idle one takes what is in the buffer for context."""
        dims, block, size = self._dims, self._dims.block_size, self._state_bytes
        ends = {slot: min(self._known[slot].end, self.cache.lengths[slot] + rows) for slot in slots}
        passed = range(min(slots), max(slots) + 1) if self.network.neighbours else slots
        past = np.array([ends[s] - rows if s in ends else self.cache.lengths[s] for s in passed], np.int32)
        for n, (slot, start) in enumerate(zip(passed, past.tolist(), strict=True)):
            self.cache.check_room(slot, start + rows + block - self.cache.lengths[slot])
            target = self._context + n * rows * size
            for address, count in self._ring_pieces(slot, start, rows) if slot in ends else ():
                self._device.copy(target, address, count * size)
                target += count * size
        tokens = np.full((len(passed), block), dims.mask_token_id, np.int32)
        tokens[[passed.index(slot) for slot in slots], 0] = bonus_tokens
        control: dict[str, NDArray[np.int32]] = {
            names.TOKEN_IDS: tokens,
            names.POSITIONS: (past[:, None] + np.arange(rows + block)).astype(np.int32),
            names.PAST_LEN: past,
        }
        results = draft_results(self._kind, len(passed), self._candidates).offsets
        others = {name: self._results_at + offset for name, offset in results.items()} | {names.TAPS: self._context}
        varying = {names.TAPS: (len(passed), rows, dims.taps_width)}
        key = (len(passed), rows) if capture else None
        self.network.run(passed, self._upload, control, others, varying, key=key)
        for slot, end in ends.items():
            self.cache.append(slot, end - self.cache.lengths[slot])
        return passed

    def _fetch(self, group: Sequence[DraftRequest], passed: Sequence[int]) -> dict[int, Draft]:
        """Wait for a pass over the slots `passed` and read its drafts by slot."""
        layout = draft_results(self._kind, len(passed), self._candidates)
        host = self._host_results[: layout.total_bytes]
        self._device.download(host, self._results_at)
        self._device.synchronize()

        def read(name: str, dtype: type[Any], *more: int) -> NDArray[Any]:
            """An output [N, L, C, …]."""
            start, size = layout.offsets[name], layout.sizes[name]
            return host[start : start + size].view(dtype).reshape(len(passed), self._dims.draft_length, -1, *more)

        token_ids, head = read(names.CANDIDATES, np.int32), self._kind.pairs
        rows = [(r, passed.index(r.slot)) for r in group]
        if head is not None:
            factors = (read(name, np.float32, head.rank) for name in (names.LEFT, names.RIGHT))
            pairs = (read(names.UNARY, np.float32), token_ids, *factors)
            return {r.slot: Draft(Bilinear(*(array[n].copy() for array in pairs))) for r, n in rows}
        arrays = (read(names.LOG_PROBS, np.float32), token_ids)
        return {r.slot: Draft(Marginals(*(array[n, :, : r.top_k].copy() for array in arrays))) for r, n in rows}


make = BlockDrafter  # the drafter of an engine
