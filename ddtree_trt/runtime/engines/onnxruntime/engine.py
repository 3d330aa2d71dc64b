"""The ONNX Runtime engine: the target and its drafter on the CPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.device.cpu import SINGLE_THREAD_BYTES, usable_cores
from ddtree_trt.runtime.engines.base import LogitRows, Verdict, VerifyRequest, why_inexact
from ddtree_trt.runtime.engines.drafters import SlotCalls, check_up_to_date, make_drafter
from ddtree_trt.runtime.engines.onnxruntime.network import OrtLanguageModel
from ddtree_trt.runtime.options import DEFAULTS, EngineOptions
from ddtree_trt.runtime.tree import token_chain


@dataclass(frozen=True)
class _LastPass:
    """A slot's last target pass."""

    token_ids: NDArray[np.int64]  # [T]
    taps: NDArray[np.float32] | None  # [T, M·H]: in the network's buffer
    prompt_ends: bool  # with the last of the tokens


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
        threads = options.threads or (1 if weights < SINGLE_THREAD_BYTES else usable_cores())
        self.threads = threads
        graph, taps = directory / artifact.TARGET_GRAPH, len(manifest.drafting.tap_layers)
        self.target = OrtLanguageModel(graph, manifest.target_dims, manifest, threads, taps=taps)
        self.drafter = make_drafter(manifest, directory / artifact.DRAFTER_GRAPH, threads)
        self._last_passes: dict[int, _LastPass] = {}  # by slot

    def prefill(self, slot: int, token_ids: NDArray[np.int64], *, rows: LogitRows, taps: bool) -> Verdict:
        (verdict,) = self.verify([VerifyRequest(slot, token_chain(token_ids), rows=rows)])
        self.commit(slot, np.arange(len(token_ids), dtype=np.int32), taps=taps)
        return verdict

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        outputs = self.target.extend_all(requests)
        for request, output in zip(requests, outputs, strict=True):
            ends = request.rows == "last"
            self._last_passes[request.slot] = _LastPass(request.tree.token_ids, output.taps, ends)
        return [Verdict(output.choices, output.logits) for output in outputs]

    def commit(self, slot: int, path: NDArray[np.int32], *, taps: bool) -> None:
        last = self._last_passes[slot]
        if taps:
            check_up_to_date(self.drafter, self.target.cache, slot)
            # A copy of a slice takes a fifth of one by indices, which is felt where a pass takes half a millisecond.
            kept = slice(len(path)) if path[-1] == len(path) - 1 else path
            taps_kept = None if last.taps is None else last.taps[kept].copy()
            self.drafter.append_context(slot, last.token_ids[kept], taps_kept)
        self.target.cache.compact(slot, path, prompt_ends=last.prompt_ends)

    def warm_up(self, progress: Progress = no_progress) -> None:
        """Does nothing: sessions are initialised when they are made."""

    def synchronize(self) -> None:
        """Does nothing: every call returns when its work is done."""

    def close(self) -> None:
        self._last_passes.clear()
        self.release()
