"""The ONNX Runtime engine: both graphs on the CPU, caches shared between past and present.

Rules of `GroupQueryAttention` this file keeps (a wrong value gives garbage without an error):
seqlens_k is past + T − 1 of each sequence, total_length the largest past + T, the bias exactly that wide, and the past
and present of a layer are one buffer.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from ddtree_trt import _native, artifact
from ddtree_trt import tensors as names
from ddtree_trt.artifact import Manifest, TransformerDims
from ddtree_trt.errors import ArtifactError, EngineError
from ddtree_trt.runtime.engine import Draft, DraftRequest, LogitRows, Verdict, VerifyRequest
from ddtree_trt.runtime.kv import SlotCache
from ddtree_trt.runtime.tree import TokenTree, chain_parents

# Below this many bytes of weights a pass is too short for threads to help: waking them costs more than they save.
SINGLE_THREAD_BYTES = 64 << 20


class Network:
    """One session with its cache: runs passes over one slot at a time."""

    def __init__(self, path: Path, dims: TransformerDims, slots: int, rows: int, threads: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        try:
            self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exceptions share no useful base
            raise ArtifactError(f"ONNX Runtime {ort.__version__} cannot load {path}: {error}; rebuild it") from error
        self.cache = SlotCache(dims, slots, rows)
        self._past = names.past_names(dims.num_layers)
        self._present = names.present_names(dims.num_layers)
        self._bindings: dict[int, Any] = {}

    def _binding(self, slot: int) -> Any:
        """The slot's binding with its caches bound; made once, since rebinding every layer is slow."""
        binding = self._bindings.get(slot)
        if binding is None:
            binding = self._bindings[slot] = self.session.io_binding()
            for past, present, buffer in zip(self._past, self._present, self.cache.buffers, strict=True):
                value = ort.OrtValue.ortvalue_from_numpy(buffer[slot : slot + 1])
                binding.bind_ortvalue_input(past, value)
                binding.bind_ortvalue_output(present, value)
        return binding

    def run(
        self, slot: int, tokens: int, inputs: dict[str, NDArray[Any]], outputs: dict[str, NDArray[Any]]
    ) -> None:
        """Append `tokens` rows behind the slot's committed ones, filling `outputs`."""
        self.cache.check_room(slot, tokens)
        total = self.cache.lengths[slot] + tokens
        binding = self._binding(slot)
        binding.bind_cpu_input(names.SEQLENS_K, np.array([total - 1], np.int32))
        binding.bind_cpu_input(names.TOTAL_LENGTH, np.array(total, np.int32))
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
        try:
            self.session.run_with_iobinding(binding)
        except Exception as error:
            raise EngineError(f"ONNX Runtime failed: {error}") from error


class _Scratch:
    """Output buffers that grow to the largest shape asked for and are reused."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[Any]] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: type) -> NDArray[Any]:
        size = int(np.prod(shape))
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, dtype)
        return buffer[:size].reshape(shape)


class _Slot:
    """What the drafter still has to be told of one sequence."""

    def __init__(self) -> None:
        self.pending: list[NDArray[np.float32]] = []  # tapped states [rows, M·H] behind the drafter's context
        self.rows = 0  # rows in pending

    def add(self, taps: NDArray[np.float32]) -> None:
        self.pending.append(taps)
        self.rows += len(taps)

    def cut(self, rows: int) -> None:
        if rows < self.rows:
            self.pending = [np.concatenate(self.pending)[:rows]] if rows else []
            self.rows = rows

    def take(self) -> NDArray[np.float32]:
        taps = self.pending[0] if len(self.pending) == 1 else np.concatenate(self.pending)
        self.pending, self.rows = [], 0
        return taps


class OrtEngine:
    """The `Engine` protocol over two ONNX Runtime sessions."""

    def __init__(self, directory: Path, manifest: Manifest, *, threads: int = 0) -> None:
        self.manifest = manifest
        limits = manifest.limits
        weights = manifest.files[artifact.WEIGHTS].size
        if threads <= 0:
            threads = 1 if weights < SINGLE_THREAD_BYTES else len(os.sched_getaffinity(0))
        self.threads = threads
        slots, rows = limits.max_batch, limits.cache_rows
        self._dims, self._draft_dims = manifest.target_dims, manifest.dflash
        self._target = Network(directory / artifact.TARGET_GRAPH, self._dims, slots, rows, threads)
        self._drafter = Network(directory / artifact.DRAFTER_GRAPH, self._draft_dims, slots, rows, threads)
        self._tap_width = len(self._draft_dims.tap_layers) * self._dims.hidden_size
        self._slots = [_Slot() for _ in range(slots)]
        self._scratch = _Scratch()
        self._taps: dict[int, NDArray[np.float32]] = {}  # slot → tapped states [T, M·H] of its last target pass

    def length(self, slot: int) -> int:
        return self._target.cache.lengths[slot]

    def draftable_length(self, slot: int) -> int:
        return self._drafter.cache.lengths[slot] + self._slots[slot].rows

    def truncate(self, slot: int, length: int) -> None:
        self._target.cache.truncate(slot, length)
        context = min(self._drafter.cache.lengths[slot], length)
        self._drafter.cache.truncate(slot, context)
        self._slots[slot].cut(length - context)

    def prefill(self, slot: int, token_ids: NDArray[np.int64], *, rows: LogitRows, taps: bool) -> Verdict:
        tokens = len(token_ids)
        tree = TokenTree(token_ids, chain_parents(tokens), np.arange(tokens, dtype=np.int32))
        first = 0 if rows == "all" else tokens - 1
        verdict = self._pass(slot, tree, np.arange(first, tokens))
        self.commit(slot, np.arange(tokens, dtype=np.int32), taps=taps)
        return verdict

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        """One pass per slot: the runtime's attention kernel takes several tokens behind a past for one sequence only.
        Each slot's results are copied out, since the next pass overwrites them."""
        if len(requests) == 1:
            return [self._pass(requests[0].slot, requests[0].tree, np.arange(len(requests[0].tree)))]
        verdicts = []
        for r in requests:
            v = self._pass(r.slot, r.tree, np.arange(len(r.tree)))
            self._taps[r.slot] = self._taps[r.slot].copy()
            verdicts.append(Verdict(v.choices.copy(), v.logits.copy()))
        return verdicts

    def _pass(self, slot: int, tree: TokenTree, rows: NDArray[np.int64]) -> Verdict:
        """Append a tree's rows to the slot's cache; logits for the wanted rows [R]."""
        past, tokens = self._target.cache.lengths[slot], len(tree)
        bias = self._scratch.take("bias", (1, 1, tokens, past + tokens), np.float32)
        _native.attention_bias(tree.parents, past, bias[0, 0])
        inputs = {
            names.TOKEN_IDS: tree.token_ids[None],
            names.POSITIONS: (tree.depths + np.int64(past))[None],
            names.ATTENTION_BIAS: bias,
            names.ROWS: rows,
        }
        logits = self._scratch.take("logits", (len(rows), self._dims.vocab_size), np.float32)
        choices = self._scratch.take("choices", (len(rows),), np.int64)
        taps = self._scratch.take("taps", (1, tokens, self._tap_width), np.float32)
        self._target.run(slot, tokens, inputs, {names.LOGITS: logits, names.CHOICES: choices, names.TAPS: taps})
        self._taps[slot] = taps[0]
        return Verdict(choices, logits)

    def commit(self, slot: int, path: NDArray[np.int32], *, taps: bool) -> None:
        if taps:
            if self.draftable_length(slot) != self.length(slot):
                raise EngineError(f"slot {slot}: target states before token {self.length(slot)} were not kept")
            self._slots[slot].add(self._taps[slot][path])
        self._target.cache.compact(slot, path)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        slot, dims, cache = request.slot, self._draft_dims, self._drafter.cache
        if self.draftable_length(slot) != self.length(slot) or not self._slots[slot].rows:
            raise EngineError(f"slot {slot} has no new target states to draft from")
        taps = self._slots[slot].take()
        chunk = self.manifest.limits.prefill_chunk
        block = np.full((1, dims.block_size), dims.mask_token_id, np.int64)
        block[0, 0] = request.bonus_token
        k = min(request.top_k, dims.vocab_size)
        length = dims.block_size - 1
        log_probs, token_ids = np.empty((1, length, k), np.float32), np.empty((1, length, k), np.int64)
        for start in range(0, len(taps), chunk):
            # All but the last piece only extend the drafter's context; their block is overwritten by the next.
            piece = taps[start : start + chunk]
            past, rows = cache.lengths[slot], len(piece) + dims.block_size
            inputs = {
                names.TAPS: piece[None],
                names.TOKEN_IDS: block,
                names.POSITIONS: np.arange(past, past + rows, dtype=np.int64)[None],
                names.TOP_K: np.array([k], np.int64),
            }
            outputs = {names.LOG_PROBS: log_probs, names.CANDIDATES: token_ids}
            self._drafter.run(slot, rows, inputs, outputs)
            cache.append(slot, len(piece))
        return Draft(log_probs[0], token_ids[0].astype(np.int32))

    def close(self) -> None:
        self._taps.clear()
        del self._target, self._drafter

