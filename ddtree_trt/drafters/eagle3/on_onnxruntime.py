"""The passes of an EAGLE-3 drafter in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.drafters.eagle3.dims import Eagle3Dims
from ddtree_trt.drafters.eagle3.drafter import EagleDrafter, Level, Nodes
from ddtree_trt.runtime.engines.drafters import Drafter
from ddtree_trt.runtime.engines.onnxruntime.network import OrtNetwork

HIDDEN = np.finfo(np.float32).min  # bias of a row that another does not see

Floats = NDArray[np.float32]


class OrtEagle(OrtNetwork):
    """A session of the drafter's graph: passes compute only the rows that the cache does not have."""

    dims: Eagle3Dims

    def join(self, pieces: Sequence[Floats]) -> Floats:
        return np.concatenate(pieces)

    def absorb(self, slot: int, token_ids: NDArray[np.int64], states: Floats, top_k: int) -> Level:
        rows, past = len(token_ids), self.cache.lengths[slot]
        positions = np.arange(past, past + rows)
        bias = self._bias(np.tri(rows, dtype=bool), past, 0)
        none = np.empty((0, self.dims.hidden_size), np.float32)
        level = self._pass(slot, token_ids, positions, bias, (states, none), np.array([rows - 1]), top_k)
        self.cache.append(slot, rows)
        return level

    def expand(self, slot: int, nodes: Nodes, top_k: int) -> Level:
        past, first = self.cache.lengths[slot], nodes.first
        rows = len(nodes.token_ids) - first
        none = np.empty((0, self.dims.taps_width), np.float32)
        features = none, np.stack(nodes.features[first:])
        bias = self._bias(nodes.sees, past, first)
        self.cache.append(slot, first)  # for this pass: the rows of earlier nodes
        try:
            wanted = np.arange(rows)
            return self._pass(slot, nodes.token_ids[first:], nodes.depths[first:] + past, bias, features, wanted, top_k)
        finally:
            self.cache.truncate(slot, past)

    def _bias(self, sees: NDArray[np.bool_], past: int, first: int) -> Floats:
        """The attention bias [1, 1, T, past + m] of rows from `first` on, where `sees` is [m, m]."""
        bias = self.buffers.take(names.ATTENTION_BIAS, (1, 1, len(sees) - first, past + len(sees)), np.float32)
        bias[..., :past] = 0
        bias[0, 0, :, past:] = np.where(sees[first:], np.float32(0), HIDDEN)
        return bias

    def _pass(
        self,
        slot: int,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        bias: Floats,
        states: tuple[Floats, Floats],
        wanted: NDArray[np.int64],
        top_k: int,
    ) -> Level:
        """Write rows of tokens [T] whose states are tapped ones [C, M·H], then features [D, H]; the results of rows
        `wanted` [R]."""
        take, rows, results = self.buffers.take, len(token_ids), len(wanted)
        k = min(top_k, self.dims.head_size)
        shapes = {names.TOKEN_IDS: (1, rows), names.POSITIONS: (1, rows), names.ROWS: (results,), names.TOP_K: (1,)}
        values = (token_ids, positions, wanted, k)
        inputs: dict[str, NDArray[Any]] = {names.ATTENTION_BIAS: bias}
        for (name, shape), value in zip(shapes.items(), values, strict=True):
            inputs[name] = take(name, shape, np.int64)
            inputs[name][...] = value
        if self._attends_apart:
            inputs[names.ATTENDED] = take(names.ATTENDED, (rows,), np.int64)
            inputs[names.ATTENDED][...] = np.arange(rows)
        inputs |= {name: np.ascontiguousarray(part)[None] for name, part in zip(_STATES, states, strict=True)}
        outputs = {
            names.OUTPUTS: take(names.OUTPUTS, (results, self.dims.hidden_size), np.float32),
            names.LOG_PROBS: take(names.LOG_PROBS, (results, k), np.float32),
            names.CANDIDATES: take(names.CANDIDATES, (results, k), np.int64),
        }
        self.run(slot, rows, inputs, outputs)
        log_probs, ids = outputs[names.LOG_PROBS].copy(), outputs[names.CANDIDATES].astype(np.int32)
        return Level(list(outputs[names.OUTPUTS].copy()), log_probs, ids)


_STATES = (names.TAPS, names.FEATURES)


def make(manifest: Manifest, graph: Path, threads: int) -> Drafter:
    """The drafter of an engine. Raises ArtifactError when its graph does not match the manifest."""
    dims, limits = manifest.drafting.dims, manifest.limits
    widths = {names.TAPS: dims.taps_width, names.FEATURES: dims.hidden_size, names.OUTPUTS: dims.hidden_size}
    network = OrtEagle(graph, dims, limits.max_batch, limits.cache_rows, threads, widths=widths)
    return EagleDrafter(network, limits.prefill_chunk, limits.max_tokens_per_pass)
