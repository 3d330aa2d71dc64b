"""The passes of an EAGLE-3 drafter in ONNX Runtime."""

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
        return self._pass(rows, [0] * len(rows), states, none, top_k)

    def expand(self, rows: Sequence[NewRows], top_k: int) -> Level:
        none = np.empty((0, self.dims.taps_width), np.float32)
        features = np.stack([feature for each in rows for feature in each.states[each.first :]])
        return self._pass(rows, [each.first for each in rows], none, features, top_k)

    def _pass(self, rows: Sequence[NewRows], done: Sequence[int], taps: Floats, features: Floats, top_k: int) -> Level:
        """Write rows [T] but those done, with tapped states [C, M·H], then features [D, H]: results of those wanted."""
        take, k = self.buffers.take, min(top_k, self.dims.head_size)
        placed = [SlotRows(r.slot, len(r.tree) - start, done=start) for r, start in zip(rows, done, strict=True)]
        token_ids = np.concatenate([r.tree.token_ids[start:] for r, start in zip(rows, done, strict=True)])
        ends = zip(accumulate(each.nodes for each in placed), rows, strict=True)
        inputs: dict[str, NDArray[Any]] = {
            names.TOKEN_IDS: token_ids[None],
            names.ROWS: np.concatenate([np.arange(end - len(r.tree) + r.first, end) for end, r in ends]),
            names.TOP_K: np.array([k]),
            names.TAPS: taps[None],
            names.FEATURES: features[None],
        }
        results = len(inputs[names.ROWS])
        outputs = {
            names.OUTPUTS: take(names.OUTPUTS, (results, self.dims.hidden_size), np.float32),
            names.LOG_PROBS: take(names.LOG_PROBS, (results, k), np.float32),
            names.CANDIDATES: take(names.CANDIDATES, (results, k), np.int64),
        }
        self.run(placed, inputs, outputs, np.concatenate([each.tree.parents for each in rows]))
        log_probs, ids = outputs[names.LOG_PROBS].copy(), outputs[names.CANDIDATES].astype(np.int32)
        return Level(list(outputs[names.OUTPUTS].copy()), log_probs, ids)


def make(manifest: Manifest, graph: Path, threads: int) -> Drafter:
    """The drafter of an engine. Raises ArtifactError when its graph does not match the manifest."""
    dims, limits = manifest.drafting.dims, manifest.limits
    widths = {names.TAPS: dims.taps_width, names.FEATURES: dims.hidden_size, names.OUTPUTS: dims.hidden_size}
    network = OrtEagle(graph, dims, manifest, threads, widths=widths)
    return EagleDrafter(network, limits.prefill_chunk, limits.max_tokens_per_pass)
