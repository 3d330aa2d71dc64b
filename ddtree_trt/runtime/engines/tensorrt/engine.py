"""The engine of TensorRT and of TensorRT for RTX: its plans, one stream, one block of device memory that never moves.

In a round, `draft` and `verify` are each one upload, one graph and one download, for which the host waits; `commit`
waits for nothing. All slots of a call are in one pass. Tapped states stay on the device, logits until they are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.device import buffers
from ddtree_trt.device.buffers import MOST_CAPTURED, CacheShape, StateShapes, aligned, buckets, pass_rows
from ddtree_trt.device.cuda_device import Device, Upload
from ddtree_trt.errors import EngineError
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.runtime.engines.base import LogitRows, Verdict, VerifyRequest, why_inexact
from ddtree_trt.runtime.engines.drafters import SlotCalls, make_drafter
from ddtree_trt.runtime.engines.passes import closed_on_failure, make_single_passes
from ddtree_trt.runtime.engines.tensorrt.compaction import Compaction, DeltaStates
from ddtree_trt.runtime.engines.tensorrt.model import TrtLanguageModel
from ddtree_trt.runtime.engines.tensorrt.network import TrtNetwork
from ddtree_trt.runtime.engines.tensorrt.opening import Loaded
from ddtree_trt.runtime.options import DEFAULTS, EngineOptions
from ddtree_trt.runtime.tree import token_chain


class TrtEngine(SlotCalls):
    """The `Engine` protocol over TensorRT or TensorRT for RTX. One thread calls it."""

    target: TrtLanguageModel
    threads = 1
    rounds = None
    mixes = False

    def __init__(self, manifest: Manifest, loaded: Loaded) -> None:
        """Takes ownership of `loaded`, which `close` releases."""
        self.manifest = manifest
        self.inexact = why_inexact(manifest)
        self.limits = manifest.limits
        self.device: Device = loaded.device
        self.buckets = buckets(1 + self.limits.max_tree_budget)
        self._loaded = loaded
        self._last_pass: dict[int, tuple[VerifyRequest, int]] = {}  # by slot, with its first row of all in the pass
        device, dims, drafter_dims = loaded.device, manifest.target_dims, manifest.drafter_dims
        at, sizes, size = loaded.addresses, loaded.layout.sizes, PRECISIONS[manifest.precision].value_bytes
        taps = manifest.drafting.tap_layers
        self._state_bytes = len(taps) * dims.hidden_size * size
        self._taps = at[buffers.TAPS] if taps else 0

        def upload(name: str) -> Upload:
            return Upload(device, at[name], device.pinned(sizes[name]))

        def network(name: str, engine: Any, tables: Mapping[str, int], dims: TransformerDims, cache: str) -> TrtNetwork:
            shape = CacheShape.of(dims, self.limits, size)
            states = self._states.tensors if self._states else {}
            return TrtNetwork(name, engine, loaded, tables, dims, shape, at[cache], states)

        shapes, kept = StateShapes.of(dims), dict[str, int]()
        self._states = DeltaStates(shapes, self.limits, device, at[buffers.TARGET_STATES]) if dims.delta else None
        if dims.delta is not None:  # outputs of a pass that are inputs of a commit
            each = aligned(pass_rows(self.limits, self.limits.max_batch) * shapes.row_bytes)
            kept = {names.kept_name(layer): at[buffers.KEPT] + layer * each for layer in range(shapes.layers)}
        results = device.pinned(sizes[buffers.RESULTS])
        outputs = {names.CHOICES: at[buffers.RESULTS], names.LOGITS: at[buffers.LOGITS]}
        outputs |= {names.TAPS: self._taps} if taps else {}
        self.target = TrtLanguageModel(
            network("target", loaded.target, {**loaded.target_tables, **kept}, dims, buffers.TARGET_KV),
            self.limits, dims.vocab_size, upload(buffers.TARGET_CONTROL), outputs, results, self._states,
        )  # fmt: skip
        each = sizes[buffers.COMMIT_CONTROL] // self.limits.max_batch
        uploads = [
            Upload(device, at[buffers.COMMIT_CONTROL] + slot * each, device.pinned(each))
            for slot in range(self.limits.max_batch)
        ]
        drafter_network = network("drafter", loaded.drafter, loaded.drafter_tables, drafter_dims, buffers.DRAFTER_KV)
        compaction = network("compaction", loaded.compaction, kept, dims, buffers.TARGET_KV)
        self._compaction = Compaction(compaction, self.limits.cache_rows, uploads, self._state_bytes)
        self.networks = [self.target.network, drafter_network, compaction]
        control = upload(buffers.DRAFTER_CONTROL)
        self.drafter = make_drafter(manifest, loaded, drafter_network, control, results)

    @classmethod
    def open(cls, directory: Path, manifest: Manifest, options: EngineOptions = DEFAULTS) -> TrtEngine:
        """Load an engine directory whose digests were checked. Raises MissingDependency for what is not installed,
        ArtifactError for an engine of another toolchain, plugin or GPU, and EngineError when CUDA or TensorRT fails or
        the GPU's memory is too small."""
        loaded = Loaded(directory, manifest)
        with closed_on_failure(loaded):
            return cls(manifest, loaded)

    def prefill(self, slot: int, token_ids: NDArray[np.int64], *, rows: LogitRows, taps: bool) -> Verdict:
        """Not captured: a chunk's work takes longer than its launches, and its length may be any."""
        tokens = len(token_ids)
        first = 0 if rows == "all" else tokens - 1  # an engine computes at least one row
        request = VerifyRequest(slot, token_chain(token_ids), rows=rows)
        choices = self.target.run([request], tokens, np.arange(first, tokens), captured=False)
        self._last_pass = {slot: (request, 0)}
        self.commit(slot, np.arange(tokens, dtype=np.int32), taps=taps)
        wanted = choices[:0] if rows == "none" else choices
        return Verdict(wanted, self.target.logits(0, len(wanted)))

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        longest = max(len(r.tree) for r in requests)
        if longest > self.buckets[-1]:
            raise EngineError(f"a tree of {longest} tokens, the engine was built for {self.buckets[-1]}")
        tokens = next(t for t in self.buckets if t >= longest)
        passed = self.target.pass_requests(requests)
        choices = self.target.run(passed, tokens, np.arange(len(passed) * tokens), captured=True)
        starts = {request.slot: n * tokens for n, request in enumerate(passed)}
        self._last_pass = {request.slot: (request, starts[request.slot]) for request in requests}
        parts = [(starts[request.slot], len(request.tree)) for request in requests]
        return [Verdict(choices[start : start + size], self.target.logits(start, size)) for start, size in parts]

    def commit(self, slot: int, path: NDArray[np.int32], *, taps: bool) -> None:
        if slot not in self._last_pass:
            raise EngineError(f"slot {slot} was not in the last target pass: there is nothing to commit")
        (request, first), size, past = self._last_pass.pop(slot), len(path), self.length(slot)
        states = self._taps + first * self._state_bytes
        if self._states is not None or int(path[-1]) != size - 1:
            ends, cuts = request.rows == "last", {}
            if self._states is not None:
                cuts = self._states.cuts(slot, past, past + size, prompt_ends=ends)
            self._compaction.move(slot, past, path, first, states if taps and self._state_bytes else None, cuts)
        if taps:
            self.drafter.append_context(slot, request.tree.token_ids[path], states)
        self.target.cache.append(slot, size)

    def warm_up(self, progress: Progress = no_progress) -> None:
        """Capture every graph of one sequence's rounds: with native attention each slot has graphs of its own, and as
        many slots are warmed as a network keeps graphs for. Those of more sequences are captured at their first use."""
        slots = 1
        if self.target.network.neighbours:
            slots = max(1, min(self.limits.max_batch, MOST_CAPTURED // len(self.buckets)))
        for slot in range(self.limits.max_batch):
            self._compaction.warm_up(slot)
        drafts = partial(self.drafter.warm_up, budget=self.limits.max_tree_budget)
        make_single_passes(self, self.buckets, drafts, progress, slots=slots)
        if self._loaded.kernel_cache is not None:
            self._loaded.kernel_cache.store()

    def synchronize(self) -> None:
        self.device.synchronize()

    def close(self) -> None:
        """Release all memory; a second call does nothing. Raises EngineError for an error of CUDA."""
        self._last_pass.clear()
        self.target.generation += 1  # later reads of the last pass's logits raise EngineError
        try:
            self.device.stop()
        finally:
            for network in self.networks:
                network.close()
            self._loaded.close()
