"""The ONNX Runtime engine: the target and its drafter on the CPU."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.device.cpu import SINGLE_THREAD_BYTES, usable_cores
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.engines.base import LogitRows, Verdict, VerifyRequest, why_inexact
from ddtree_trt.runtime.engines.drafters import SlotCalls, make_drafter
from ddtree_trt.runtime.engines.onnxruntime.network import OrtLanguageModel
from ddtree_trt.runtime.options import DEFAULTS, EngineOptions
from ddtree_trt.runtime.tree import token_chain


class OrtEngine(SlotCalls):
    """The `Engine` protocol over two ONNX Runtime sessions."""

    target: OrtLanguageModel
    rounds = None
    buckets = None
    mixes = True

    def __init__(self, directory: Path, manifest: Manifest, options: EngineOptions = DEFAULTS) -> None:
        """Loads an engine directory whose digests were checked."""
        self.manifest = manifest
        self.inexact = why_inexact(manifest)
        weights = manifest.files[artifact.WEIGHTS].size
        self.threads = threads = options.threads or (1 if weights < SINGLE_THREAD_BYTES else usable_cores())
        graph, taps = directory / artifact.TARGET_GRAPH, len(manifest.drafting.tap_layers)
        self.target = OrtLanguageModel(graph, manifest.target_dims, manifest, threads, taps=taps)
        self.drafter = make_drafter(manifest, directory / artifact.DRAFTER_GRAPH, threads)
        # By slot, with its tapped states [T, M·H].
        self._last_pass: dict[int, tuple[VerifyRequest, NDArray[np.float32] | None]] = {}

    def prefill(self, slot: int, token_ids: NDArray[np.int64], *, rows: LogitRows, taps: bool) -> Verdict:
        (verdict,) = self.verify([VerifyRequest(slot, token_chain(token_ids), rows=rows)])
        self.commit(slot, np.arange(len(token_ids), dtype=np.int32), taps=taps)
        return verdict

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        outputs = self.target.extend_all(requests)
        self._last_pass = {r.slot: (r, states) for r, (_, states) in zip(requests, outputs, strict=True)}
        return [verdict for verdict, _ in outputs]

    def commit(self, slot: int, path: NDArray[np.int32], *, taps: bool) -> None:
        if slot not in self._last_pass:
            raise EngineError(f"slot {slot} was not in the last pass, so there is nothing to commit; verify it again")
        request, states = self._last_pass.pop(slot)
        if taps:
            tokens = request.tree.token_ids
            if len(path) < len(tokens):
                kept = slice(len(path)) if path[-1] == len(path) - 1 else path  # a slice is copied faster
                tokens, states = tokens[kept], None if states is None else states[kept]
            self.drafter.append_context(slot, tokens, states)
        self.target.cache.compact(slot, path, prompt_ends=request.rows == "last")

    def warm_up(self, progress: Progress = no_progress) -> None:
        """Does nothing: sessions are initialised when they are made."""

    def synchronize(self) -> None:
        """Does nothing: every call returns when its work is done."""

    def close(self) -> None:
        self._last_pass.clear()
        self.release()
