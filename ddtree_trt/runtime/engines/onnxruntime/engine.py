"""The ONNX Runtime engine: the target and its drafter on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.device.cpu import SINGLE_THREAD_BYTES, usable_cores
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, LogitRows, Verdict, VerifyRequest
from ddtree_trt.runtime.engines.drafters import check_up_to_date, draft_all, make_drafter
from ddtree_trt.runtime.engines.onnxruntime.network import OrtLanguageModel
from ddtree_trt.runtime.options import DEFAULTS, EngineOptions
from ddtree_trt.runtime.tree import TokenTree, token_chain


@dataclass(frozen=True)
class _LastPass:
    """A slot's last target pass."""

    token_ids: NDArray[np.int64]  # [T]
    taps: NDArray[np.float32] | None  # [T, M·H]: in the network's buffer


class OrtEngine:
    """The `Engine` protocol over two ONNX Runtime sessions."""

    rounds = None
    buckets = None
    batches = False

    def __init__(self, directory: Path, manifest: Manifest, options: EngineOptions = DEFAULTS) -> None:
        # In int8 the last bit of a sum may decide to which integer a value is rounded, and the difference grows from
        # layer to layer, so equal bits are worth the slower single tokens.
        self.exact = PRECISIONS[manifest.precision].quantized if options.exact is None else options.exact
        if self.exact:
            # Single tokens take longer then, and the toolchain is a part of the latency profile's fingerprint.
            manifest = replace(manifest, toolchain={**manifest.toolchain, "single_tokens": "exact"})
        self.manifest = manifest
        weights = manifest.files[artifact.WEIGHTS].size
        threads = options.threads or (1 if weights < SINGLE_THREAD_BYTES else usable_cores())
        self.threads = threads
        limits, taps = manifest.limits, len(manifest.drafting.tap_layers)
        self._target = OrtLanguageModel(
            directory / artifact.TARGET_GRAPH,
            manifest.target_dims,
            limits.max_batch,
            limits.cache_rows,
            threads,
            taps=taps,
            exact=self.exact,
        )
        self._drafter = make_drafter(manifest, "onnxruntime", directory / artifact.DRAFTER_GRAPH, threads)
        self._last_passes: dict[int, _LastPass] = {}  # by slot

    @classmethod
    def open(cls, directory: Path, manifest: Manifest, options: EngineOptions = DEFAULTS) -> OrtEngine:
        """Load an engine directory whose digests were checked.

        Raises UsageError where it cannot be exact.
        """
        if options.exact and manifest.target_dims.experts:
            raise UsageError(
                f"{directory} has a mixture of experts, whose products depend on how many rows of a pass choose an "
                "expert; leave exact out"
            )
        return cls(directory, manifest, options)

    @property
    def lookahead(self) -> Callable[[int, NDArray[np.int32]], None] | None:
        return self._learn if self.exact else None

    def length(self, slot: int) -> int:
        return self._target.cache.lengths[slot]

    def draftable_length(self, slot: int) -> int:
        return min(self._drafter.context_length(slot), self.length(slot))

    def truncate(self, slot: int, length: int) -> None:
        self._target.cache.truncate(slot, length)
        self._drafter.truncate(slot, length)

    def prefill(self, slot: int, token_ids: NDArray[np.int64], *, rows: LogitRows, taps: bool) -> Verdict:
        tokens = len(token_ids)
        tree = token_chain(token_ids)
        first = 0 if rows == "all" else tokens - 1
        verdict = self._pass(slot, tree, np.arange(first, tokens))
        self.commit(slot, np.arange(tokens, dtype=np.int32), taps=taps)
        if rows == "none":  # the graph computes at least one row
            return Verdict(verdict.choices[:0], np.empty((0, self.manifest.target_dims.vocab_size), np.float32))
        return verdict

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        """One request at a time, as `batches` says: the runtime's attention kernel takes several tokens behind a past
        for one sequence only."""
        (request,) = requests
        return [self._pass(request.slot, request.tree, np.arange(len(request.tree)))]

    def _pass(self, slot: int, tree: TokenTree, rows: NDArray[np.int64]) -> Verdict:
        """Write a tree's rows behind the slot's committed ones; the verdict has the rows `rows` [R]."""
        output = self._target.extend(slot, tree, rows)
        self._last_passes[slot] = _LastPass(tree.token_ids, output.taps)
        return Verdict(output.choices, output.logits)

    def commit(self, slot: int, path: NDArray[np.int32], *, taps: bool) -> None:
        if taps:
            if self._drafter.context_length(slot) > self.length(slot):  # lookahead tokens, which were computed again
                self._drafter.truncate(slot, self.length(slot))
            check_up_to_date(self._drafter, self._target.cache, slot)
            self._learn(slot, path)
        self._target.cache.compact(slot, path)

    def _learn(self, slot: int, nodes: NDArray[np.int32]) -> None:
        """Pass nodes [m] of the slot's last tree to the drafter."""
        last = self._last_passes[slot]
        self._drafter.append_context(slot, last.token_ids[nodes], None if last.taps is None else last.taps[nodes])

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return draft_all(self._drafter, self._target.cache, requests)

    def warm_up(self, progress: Progress = no_progress) -> None:
        """Does nothing: sessions are initialised when they are made."""

    def synchronize(self) -> None:
        """Does nothing: every call returns when its work is done."""

    def close(self) -> None:
        self._last_passes.clear()
        for network in ("_target", "_drafter"):
            vars(self).pop(network, None)
