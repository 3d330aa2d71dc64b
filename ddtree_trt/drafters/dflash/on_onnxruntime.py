"""The DFlash drafter of the ONNX Runtime engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.engines.base import Draft, DraftRequest
from ddtree_trt.runtime.engines.drafters import Drafter
from ddtree_trt.runtime.engines.onnxruntime.network import OrtNetwork, SlotRows
from ddtree_trt.runtime.tree import Bilinear, Marginals


class _Waiting:
    """A slot's states that the drafter's cache does not hold yet: rows in memory of their own that is kept, since what
    is allocated in every round and lives on makes all of a pass's allocations slower."""

    def __init__(self, width: int) -> None:
        self._own = self._memory = np.empty((64, width), np.float32)
        self._first = self._end = 0

    def __len__(self) -> int:
        return self._end - self._first

    def append(self, states: NDArray[np.float32]) -> None:
        end, memory = self._end + len(states), self._memory
        if end > len(memory):
            rows, end = len(self), end - self._first
            if 2 * end > len(memory):
                self._memory = np.empty((2 * end, memory.shape[1]), np.float32)
            self._memory[:rows] = memory[self._first : self._end]
            self._first, self._end = 0, rows
        self._memory[self._end : end] = states
        self._end = end

    def forget(self, *, first: int = 0, last: int = 0) -> None:
        self._first, self._end = self._first + first, self._end - last

    def take(self) -> NDArray[np.float32]:
        """All of them, as a view that is valid until the next `append`."""
        states = self._memory[self._first : self._end]
        self._memory, self._first, self._end = self._own, 0, 0  # what a long prompt took is given back
        return states


class BlockDrafter(Drafter):
    """DFlash: one pass over [bonus, MASK × L], conditioned on the tapped target states of every committed token, or
    where all layers have windows of those that they reach: the cache's rows before them are never written."""

    def __init__(self, network: OrtNetwork, dims: DFlashDims, chunk: int) -> None:
        """`chunk`: most states of one pass."""
        self._network, self._dims, self._chunk = network, dims, chunk
        self._waiting = [_Waiting(dims.taps_width) for _ in range(network.cache.slots)]
        self._first = [0] * network.cache.slots  # of the rows, cached or not, from which on none was left out
        self._reach = max(dims.windows, default=0) * all(dims.windows)  # positions that a block sees; 0: all

    def context_length(self, slot: int) -> int:
        return self._network.cache.lengths[slot] + len(self._waiting[slot])

    def unseen(self, slot: int) -> int:
        return len(self._waiting[slot])

    def draftable(self, slot: int, length: int) -> int:
        known = super().draftable(slot, length)
        reached = max(0, known - self._reach)
        return reached if reached < self._first[slot] else known

    def append_context(self, slot: int, token_ids: NDArray[np.int64], states: NDArray[np.float32] | None) -> None:
        assert states is not None, "a target built for a block drafter taps its states"
        waiting = self._waiting[slot]
        waiting.append(states)
        if self._reach and (unreached := len(waiting) - self._reach) > 0:
            waiting.forget(first=unreached)
            self._network.cache.append(slot, unreached)
            self._first[slot] = self._network.cache.lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        cache, waiting = self._network.cache, self._waiting[slot]
        context = min(cache.lengths[slot], length)
        cache.truncate(slot, context)
        waiting.forget(last=max(0, len(waiting) - (length - context)))
        self._first[slot] = min(self._first[slot], length)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One pass for all slots, behind passes of long contexts that only extend their caches."""
        pieces = []
        for request in requests:
            states = self._waiting[request.slot].take()
            if not len(states):
                raise EngineError(f"slot {request.slot} has no new target states to draft from")
            last = (len(states) - 1) // self._chunk * self._chunk
            for start in range(0, last, self._chunk):  # the next pass overwrites their blocks
                self._pass([request], [states[start : start + self._chunk]])
            pieces.append(states[last:])
        outputs = self._pass(requests, pieces)
        return [self._drafted(request, n, outputs) for n, request in enumerate(requests)]

    def _pass(self, requests: Sequence[DraftRequest], states: Sequence[NDArray[np.float32]]) -> dict[str, NDArray[Any]]:
        """Append states [C, M·H] to each slot's cache and draft a block behind them: the graph's outputs."""
        dims, cache, take = self._dims, self._network.cache, self._network.buffers.take
        blocks = take(names.TOKEN_IDS, (len(requests), dims.block_size), np.int64)
        blocks[:, 0], blocks[:, 1:] = [request.bonus_token for request in requests], dims.mask_token_id
        taps = states[0] if len(states) == 1 else np.concatenate(states)
        inputs: dict[str, NDArray[Any]] = {names.TOKEN_IDS: blocks, names.TAPS: np.ascontiguousarray(taps)[None]}
        if (head := dims.pair_head) is None:
            k = min(max(request.top_k for request in requests), dims.head_size)
            inputs[names.TOP_K] = top_k = take(names.TOP_K, (1,), np.int64)
            top_k[0] = k
        else:
            k = head.candidates
        outputs = self._results(len(requests), k)
        rows = [SlotRows(r.slot, dims.block_size, contexts=len(s)) for r, s in zip(requests, states, strict=True)]
        self._network.run(rows, inputs, outputs)
        for request, piece in zip(requests, states, strict=True):
            cache.append(request.slot, len(piece))
        return outputs

    def _drafted(self, request: DraftRequest, n: int, outputs: dict[str, NDArray[Any]]) -> Draft:
        """The draft of sequence n of a pass."""
        if self._dims.pair_head is None:
            k = min(request.top_k, self._dims.head_size)
            log_probs, ids = (outputs[name][n, :, :k] for name in (names.LOG_PROBS, names.CANDIDATES))
            return Draft(Marginals(log_probs.copy(), ids.astype(np.int32)))
        unary, left, right = (outputs[name][n].copy() for name in (names.UNARY, names.LEFT, names.RIGHT))
        return Draft(Bilinear(unary, outputs[names.CANDIDATES][n].astype(np.int32), left, right))

    def _results(self, count: int, k: int) -> dict[str, NDArray[Any]]:
        """Memory for the graph's outputs, by their names: K or C candidates of each position."""
        take, head = self._network.buffers.take, self._dims.pair_head
        shape = (count, self._dims.draft_length, k)
        results: dict[str, NDArray[Any]] = {names.CANDIDATES: take(names.CANDIDATES, shape, np.int64)}
        if head is None:
            return {**results, names.LOG_PROBS: take(names.LOG_PROBS, shape, np.float32)}
        factors = {name: take(name, (*shape, head.rank), np.float32) for name in (names.LEFT, names.RIGHT)}
        return {**results, names.UNARY: take(names.UNARY, shape, np.float32), **factors}


def make(manifest: Manifest, graph: Path, threads: int) -> Drafter:
    """The drafter of an engine. Raises ArtifactError when its graph does not match the manifest."""
    dims, limits = manifest.drafting.dims, manifest.limits
    widths = {names.TOKEN_IDS: dims.block_size, names.TAPS: dims.taps_width}
    network = OrtNetwork(graph, dims, manifest, threads, widths=widths)
    return BlockDrafter(network, dims, limits.prefill_chunk)
