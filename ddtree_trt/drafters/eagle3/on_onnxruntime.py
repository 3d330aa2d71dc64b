"""The passes of an EAGLE-3 drafter in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.drafters.eagle3.dims import Eagle3Dims
from ddtree_trt.drafters.eagle3.drafter import EagleDrafter, Level, Nodes
from ddtree_trt.runtime.engines.drafters import Drafter
from ddtree_trt.runtime.engines.onnxruntime.network import OrtNetwork, SlotRows
from ddtree_trt.runtime.tree import chain_parents

Floats = NDArray[np.float32]


class OrtEagle(OrtNetwork):
    """A session of the drafter's graph: passes compute only the rows that the cache does not have."""

    dims: Eagle3Dims

    def join(self, pieces: Sequence[Floats]) -> Floats:
        return np.concatenate(pieces)

    def absorb(self, slot: int, token_ids: NDArray[np.int64], states: Floats, top_k: int) -> Level:
        rows = len(token_ids)
        none = np.empty((0, self.dims.hidden_size), np.float32)
        level = self._pass(SlotRows(slot, rows), token_ids, chain_parents(rows), (states, none), [rows - 1], top_k)
        self.cache.append(slot, rows)
        return level

    def expand(self, slot: int, nodes: Nodes, top_k: int) -> Level:
        first, rows = nodes.first, len(nodes.token_ids) - nodes.first
        parents = np.array([_last(sees[:node]) for node, sees in enumerate(nodes.sees)], np.int32)
        features = np.empty((0, self.dims.taps_width), np.float32), np.stack(nodes.features[first:])
        placed = SlotRows(slot, rows, done=first)
        return self._pass(placed, nodes.token_ids[first:], parents, features, np.arange(rows), top_k)

    def _pass(
        self,
        placed: SlotRows,
        token_ids: NDArray[np.int64],
        parents: NDArray[np.int32],
        states: tuple[Floats, Floats],
        wanted: ArrayLike,
        top_k: int,
    ) -> Level:
        """Write rows of tokens [T] whose states are tapped ones [C, M·H], then features [D, H]; the results of rows
        `wanted` [R]."""
        take, rows, results = self.buffers.take, len(token_ids), np.size(wanted)
        k = min(top_k, self.dims.head_size)
        shapes = {names.TOKEN_IDS: (1, rows), names.ROWS: (results,), names.TOP_K: (1,)}
        values = (token_ids, wanted, k)
        inputs: dict[str, NDArray[Any]] = {}
        for (name, shape), value in zip(shapes.items(), values, strict=True):
            inputs[name] = take(name, shape, np.int64)
            inputs[name][...] = value
        inputs |= {name: np.ascontiguousarray(part)[None] for name, part in zip(_STATES, states, strict=True)}
        outputs = {
            names.OUTPUTS: take(names.OUTPUTS, (results, self.dims.hidden_size), np.float32),
            names.LOG_PROBS: take(names.LOG_PROBS, (results, k), np.float32),
            names.CANDIDATES: take(names.CANDIDATES, (results, k), np.int64),
        }
        self.run([placed], inputs, outputs, parents)
        log_probs, ids = outputs[names.LOG_PROBS].copy(), outputs[names.CANDIDATES].astype(np.int32)
        return Level(list(outputs[names.OUTPUTS].copy()), log_probs, ids)


_STATES = (names.TAPS, names.FEATURES)


def _last(sees: NDArray[np.bool_]) -> int:
    """The last row that is seen; −1 where none is."""
    seen = np.flatnonzero(sees)
    return int(seen[-1]) if len(seen) else -1


def make(manifest: Manifest, graph: Path, threads: int) -> Drafter:
    """The drafter of an engine. Raises ArtifactError when its graph does not match the manifest."""
    dims, limits = manifest.drafting.dims, manifest.limits
    widths = {names.TAPS: dims.taps_width, names.FEATURES: dims.hidden_size, names.OUTPUTS: dims.hidden_size}
    network = OrtEagle(graph, dims, manifest, threads, widths=widths)
    return EagleDrafter(network, limits.prefill_chunk, limits.max_tokens_per_pass)
