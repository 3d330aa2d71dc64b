"""The DFlash drafter of the ONNX Runtime engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.candidates import Bilinear, Marginals
from ddtree_trt.runtime.engines.base import Draft, DraftRequest
from ddtree_trt.runtime.engines.drafters import Drafter
from ddtree_trt.runtime.engines.onnxruntime.network import OrtNetwork


class _States:
    """Tapped target states the drafter's cache does not hold yet."""

    def __init__(self) -> None:
        self.rows = 0
        self._pieces: list[NDArray[np.float32]] = []  # [rows, M·H]

    def add(self, states: NDArray[np.float32]) -> None:
        self._pieces.append(states)
        self.rows += len(states)

    def cut(self, rows: int) -> None:
        if rows < self.rows:
            self._pieces = [np.concatenate(self._pieces)[:rows]] if rows else []
            self.rows = rows

    def take(self) -> NDArray[np.float32]:
        states = self._pieces[0] if len(self._pieces) == 1 else np.concatenate(self._pieces)
        self._pieces = []
        self.rows = 0
        return states


class BlockDrafter(Drafter):
    """DFlash: one pass over [bonus, MASK × L], conditioned on the tapped target states of every committed token."""

    def __init__(self, network: OrtNetwork, dims: DFlashDims, chunk: int) -> None:
        """`chunk`: most states of one pass."""
        self._network = network
        self._dims = dims
        self._chunk = chunk
        self._pending = [_States() for _ in range(network.cache.slots)]

    def context_length(self, slot: int) -> int:
        return self._network.cache.lengths[slot] + self._pending[slot].rows

    def append_context(self, slot: int, token_ids: NDArray[np.int64], states: NDArray[np.float32] | None) -> None:
        assert states is not None, "a target built for a block drafter taps its states"
        self._pending[slot].add(states)

    def truncate(self, slot: int, length: int) -> None:
        cache = self._network.cache
        context = min(cache.lengths[slot], length)
        cache.truncate(slot, context)
        self._pending[slot].cut(length - context)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One pass per slot, as the target does."""
        return [self._draft(request) for request in requests]

    def warm_up(self, slot: int, budget: int) -> None:
        """Does nothing: sessions have nothing to capture."""

    def _draft(self, request: DraftRequest) -> Draft:
        slot, dims, cache = request.slot, self._dims, self._network.cache
        if not self._pending[slot].rows:
            raise EngineError(f"slot {slot} has no new target states to draft from")
        states, take = self._pending[slot].take(), self._network.buffers.take
        block = take(names.TOKEN_IDS, (1, dims.block_size), np.int64)
        block[0, 0], block[0, 1:] = request.bonus_token, dims.mask_token_id
        inputs: dict[str, NDArray[Any]] = {names.TOKEN_IDS: block}
        head = dims.pair_head
        k = min(request.top_k, dims.head_size) if head is None else head.candidates
        if head is None:
            inputs[names.TOP_K] = top_k = take(names.TOP_K, (1,), np.int64)
            top_k[0] = k
        outputs = self._results(k)
        for start in range(0, len(states), self._chunk):
            # All pieces but the last only extend the drafter's context; the next one overwrites their block.
            piece = states[start : start + self._chunk]
            past, rows = cache.lengths[slot], len(piece) + dims.block_size
            positions = take(names.POSITIONS, (1, rows), np.int64)
            positions[0] = np.arange(past, past + rows)
            inputs |= {names.TAPS: piece[None], names.POSITIONS: positions}
            self._network.run(slot, rows, inputs, outputs)
            cache.append(slot, len(piece))
        token_ids = outputs[names.CANDIDATES][0].astype(np.int32)
        if head is None:
            return Draft(Marginals(outputs[names.LOG_PROBS][0].copy(), token_ids))
        unary, left, right = (outputs[name][0].copy() for name in (names.UNARY, names.LEFT, names.RIGHT))
        return Draft(Bilinear(unary, token_ids, left, right))

    def _results(self, k: int) -> dict[str, NDArray[Any]]:
        """Memory for the graph's outputs, by their names: K or C candidates of each position."""
        take, head = self._network.buffers.take, self._dims.pair_head
        shape = (1, self._dims.draft_length, k)
        results: dict[str, NDArray[Any]] = {names.CANDIDATES: take(names.CANDIDATES, shape, np.int64)}
        if head is None:
            return {**results, names.LOG_PROBS: take(names.LOG_PROBS, shape, np.float32)}
        factors = {name: take(name, (*shape, head.rank), np.float32) for name in (names.LEFT, names.RIGHT)}
        return {**results, names.UNARY: take(names.UNARY, shape, np.float32), **factors}


def make(manifest: Manifest, graph: Path, threads: int) -> Drafter:
    """The drafter of an engine. Raises ArtifactError when its graph does not match the manifest."""
    dims, limits = manifest.drafting.dims, manifest.limits
    widths = {names.TOKEN_IDS: dims.block_size, names.TAPS: dims.taps_width}
    network = OrtNetwork(graph, dims, limits.max_batch, limits.cache_rows, threads, widths=widths)
    return BlockDrafter(network, dims, limits.prefill_chunk)
