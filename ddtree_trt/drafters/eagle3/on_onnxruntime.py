"""The passes of an EAGLE-3 drafter in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.drafters.eagle3.dims import Eagle3Dims
from ddtree_trt.drafters.eagle3.drafter import EagleDrafter, Level, NewRows
from ddtree_trt.runtime.engines.drafters import Drafter
from ddtree_trt.runtime.engines.onnxruntime.network import OrtNetwork, SlotRows

Floats = NDArray[np.float32]


class OrtEagle(OrtNetwork):
    """A session of the drafter's graph: passes compute only the rows that the cache does not have."""

    dims: Eagle3Dims

    def join(self, pieces: Sequence[Floats]) -> Floats:
        return np.concatenate(pieces)

    def absorb(self, rows: Sequence[NewRows], top_k: int) -> Level:
        states = np.concatenate([each.states for each in rows])
        none = np.empty((0, self.dims.hidden_size), np.float32)
        level = self._pass(rows, [0] * len(rows), (states, none), top_k)
        for each in rows:
            self.cache.append(each.slot, len(each.tree))
        return level

    def expand(self, rows: Sequence[NewRows], top_k: int) -> Level:
        none = np.empty((0, self.dims.taps_width), np.float32)
        features = np.stack([feature for each in rows for feature in each.states[each.first :]])
        return self._pass(rows, [each.first for each in rows], (none, features), top_k)

    def _pass(self, rows: Sequence[NewRows], done: Sequence[int], states: tuple[Floats, Floats], top_k: int) -> Level:
        """Write rows [T] behind so many of each slot's that are there, with tapped states [C, M·H], then features
        [D, H]; the results of those wanted."""
        take, k = self.buffers.take, min(top_k, self.dims.head_size)
        token_ids = np.concatenate([each.tree.token_ids[start:] for each, start in zip(rows, done, strict=True)])
        placed = [SlotRows(r.slot, len(r.tree) - start, done=start) for r, start in zip(rows, done, strict=True)]
        ends = accumulate(each.nodes for each in placed)
        sizes = [len(each.tree) - each.first for each in rows]
        wanted = np.concatenate([np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)])
        shapes = {names.TOKEN_IDS: (1, len(token_ids)), names.ROWS: wanted.shape, names.TOP_K: (1,)}
        inputs: dict[str, NDArray[Any]] = {}
        for (name, shape), value in zip(shapes.items(), (token_ids, wanted, k), strict=True):
            inputs[name] = take(name, shape, np.int64)
            inputs[name][...] = value
        inputs |= {name: np.ascontiguousarray(part)[None] for name, part in zip(_STATES, states, strict=True)}
        outputs = {
            names.OUTPUTS: take(names.OUTPUTS, (len(wanted), self.dims.hidden_size), np.float32),
            names.LOG_PROBS: take(names.LOG_PROBS, (len(wanted), k), np.float32),
            names.CANDIDATES: take(names.CANDIDATES, (len(wanted), k), np.int64),
        }
        self.run(placed, inputs, outputs, np.concatenate([each.tree.parents for each in rows]))
        log_probs, ids = outputs[names.LOG_PROBS].copy(), outputs[names.CANDIDATES].astype(np.int32)
        return Level(list(outputs[names.OUTPUTS].copy()), log_probs, ids)


_STATES = (names.TAPS, names.FEATURES)


def make(manifest: Manifest, graph: Path, threads: int) -> Drafter:
    """The drafter of an engine. Raises ArtifactError when its graph does not match the manifest."""
    dims, limits = manifest.drafting.dims, manifest.limits
    widths = {names.TAPS: dims.taps_width, names.FEATURES: dims.hidden_size, names.OUTPUTS: dims.hidden_size}
    network = OrtEagle(graph, dims, manifest, threads, widths=widths)
    return EagleDrafter(network, limits.prefill_chunk, limits.max_tokens_per_pass)
