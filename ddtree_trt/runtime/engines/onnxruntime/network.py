"""One network in ONNX Runtime: a session with a cache whose buffers are both past and present.

Rules of `GroupQueryAttention` that this file observes (a wrong value gives wrong numbers without an error):
seqlens_k is past + T − 1 of each sequence, total_length the largest past + T, the bias exactly that wide, and the past
and present of a layer are one buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt.artifact import tensors as names
from ddtree_trt.device.cpu import read_cpu
from ddtree_trt.errors import ArtifactError, EngineError
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.runtime.engines.drafters import Pass
from ddtree_trt.runtime.engines.passes import SlotCache
from ddtree_trt.runtime.tree import TokenTree


def session_options(threads: int) -> ort.SessionOptions:
    """Session options for this processor; 0 threads means one per core."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.enable_mem_pattern = False  # planned per set of input shapes, and the bias changes its shape every pass
    # Target and drafter have separate threads: those of one would spin on the cores that the other computes on.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if "vnni" not in read_cpu().features:
        # Without VNNI, x86 processors sum products of bytes in 16 bits, which overflow unless weights are unsigned.
        options.add_session_config_entry("session.x64quantprecision", "1")
    return options


class _Buffers:
    """Memory of the passes' inputs and outputs: it grows to the largest shape asked for and is reused."""

    def __init__(self) -> None:
        self._memory: dict[str, NDArray[Any]] = {}
        self._views: dict[str, NDArray[Any]] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: type) -> NDArray[Any]:
        """The same array as in the last call while the shape is the same, so that its binding stays valid."""
        view = self._views.get(name)
        if view is not None and view.shape == shape:
            return view
        size = math.prod(shape)
        memory = self._memory.get(name)
        if memory is None or memory.size < size:
            memory = self._memory[name] = np.empty(size, dtype)
        view = self._views[name] = memory[:size].reshape(shape)
        return view


class _Binding:
    """A slot's caches and the arrays of its passes, bound to a session. An array that is bound already is not bound
    again: a run reads its current values."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self.handle = session.io_binding()
        self._bound: dict[str, NDArray[Any]] = {}

    def cache(self, past: str, present: str, buffer: NDArray[np.float32]) -> None:
        """Bind one buffer as past and as present."""
        value = ort.OrtValue.ortvalue_from_numpy(buffer)
        self.handle.bind_ortvalue_input(past, value)
        self.handle.bind_ortvalue_output(present, value)

    def input(self, name: str, array: NDArray[Any]) -> None:
        if self._bound.get(name) is not array:
            self.handle.bind_cpu_input(name, array)
            self._bound[name] = array

    def output(self, name: str, array: NDArray[Any]) -> None:
        if self._bound.get(name) is not array:
            self.handle.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
            self._bound[name] = array


class OrtNetwork:
    """A session and the cache of its slots: runs passes over one slot at a time."""

    def __init__(
        self,
        path: Path,
        dims: TransformerDims,
        slots: int,
        rows: int,
        threads: int,
        *,
        widths: Mapping[str, int],
    ) -> None:
        """`widths`: length of the last axis by name of input or output. Raises ArtifactError when the graph cannot be
        loaded, or does not match `dims`."""
        try:
            self.session = ort.InferenceSession(str(path), session_options(threads), providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exceptions share no useful base
            reason = " ".join(str(error).split())
            raise ArtifactError(f"ONNX Runtime {ort.__version__} cannot load {path}: {reason}; rebuild it") from error
        self.dims = dims
        # Whether attention can be given an idle row that nothing else computes, because the rest needs none.
        self._attends_apart = any(end.name == names.ATTENDED for end in self.session.get_inputs())
        self._check_graph(path, rows, widths)
        self.cache = SlotCache(dims, slots, rows)
        self._past = names.past_names(dims.num_layers)
        self._present = names.present_names(dims.num_layers)
        self.buffers = _Buffers()
        self._bindings: dict[int, _Binding] = {}

    def _check_graph(self, path: Path, rows: int, widths: Mapping[str, int]) -> None:
        """Raises ArtifactError for a tensor that is missing or has another shape than the arrays bound to it, which
        would otherwise fail in the first pass or give wrong numbers."""
        shapes = {end.name: end.shape for end in (*self.session.get_inputs(), *self.session.get_outputs())}
        heads, size = self.dims.num_kv_heads, self.dims.head_dim
        cache = [*names.past_names(self.dims.num_layers), *names.present_names(self.dims.num_layers)]
        layers = sum(name.startswith("past_") for name in shapes) // 2
        if layers != self.dims.num_layers:
            raise ArtifactError(
                f"{path} has {layers} layers, the manifest says {self.dims.num_layers}; rebuild the engine"
            )
        expected = {name: {1: heads, 2: rows, 3: size} for name in cache} | {
            name: {-1: n} for name, n in widths.items()
        }
        for name, axes in expected.items():
            shape = shapes.get(name)
            if shape is None or any(shape[axis:][:1] != [wanted] for axis, wanted in axes.items()):
                wanted = " and ".join(f"{wanted} on axis {axis}" for axis, wanted in axes.items())
                raise ArtifactError(f"{path}: {name} is {shape}, the manifest asks for {wanted}; rebuild the engine")

    def _binding(self, slot: int) -> _Binding:
        """The slot's binding with its caches bound; made once, since rebinding every layer is slow."""
        binding = self._bindings.get(slot)
        if binding is None:
            binding = _Binding(self.session)
            for past, present, buffer in zip(self._past, self._present, self.cache.buffers, strict=True):
                binding.cache(past, present, buffer[slot : slot + 1])
            self._bindings[slot] = binding  # kept when it is whole: an interrupt may come before
        return binding

    def run(self, slot: int, tokens: int, inputs: dict[str, NDArray[Any]], outputs: dict[str, NDArray[Any]]) -> None:
        """Write `tokens` rows behind the slot's committed ones and fill `outputs`; nothing is committed. Arrays from
        `buffers` stay bound while their shapes stay."""
        self.cache.check_room(slot, tokens)
        total = self.cache.lengths[slot] + tokens
        seqlens = self.buffers.take(names.SEQLENS_K, (1,), np.int32)
        total_length = self.buffers.take(names.TOTAL_LENGTH, (), np.int32)
        seqlens[0], total_length[...] = total - 1, total
        binding = self._binding(slot)
        for name, array in (*inputs.items(), (names.SEQLENS_K, seqlens), (names.TOTAL_LENGTH, total_length)):
            binding.input(name, array)
        for name, array in outputs.items():
            binding.output(name, array)
        try:
            self.session.run_with_iobinding(binding.handle)
        except Exception as error:
            raise EngineError(f"ONNX Runtime failed: {error}") from error


class OrtLanguageModel(OrtNetwork):
    """A network with the target's graph: a tree of tokens in, logits out."""

    def __init__(
        self,
        path: Path,
        dims: TransformerDims,
        slots: int,
        rows: int,
        threads: int,
        *,
        taps: int = 0,
        exact: bool = False,
    ) -> None:
        """`taps` is M, the number of tapped layers. `exact`: a row's results do not depend on how many others are in
        its pass, as long as its ancestors lie right before it and there is room for one row more."""
        self._tap_width = taps * dims.hidden_size
        self._exact = exact
        self._block = min(2 * dims.head_dim, 64)
        widths = {names.LOGITS: dims.vocab_size} | ({names.TAPS: self._tap_width} if taps else {})
        super().__init__(path, dims, slots, rows, threads, widths=widths)

    def extend(self, slot: int, tree: TokenTree, rows: NDArray[np.int64]) -> Pass:
        """Write a tree's T rows behind the slot's committed ones; the results have logits for `rows` [R]."""
        # Kernels for one row sum in another order than those for several. Attention takes the rows of a pass in blocks,
        # of twice the head size or, where the processor's cache is small, a lesser power of two. So a row that is alone
        # in one is computed together with an idle row, which lies behind it in the cache, is not seen by others, and is
        # never committed.
        size, wanted = len(tree), len(rows)
        placed, asked = tree, rows
        if self._exact and size % self._block == 1 and self.cache.lengths[slot] + size < self.cache.rows:
            placed = _with_idle_row(tree)
        if self._exact and not self._attends_apart:
            tree, asked = placed, np.repeat(rows, 2) if wanted == 1 else rows
        logits, taps = self._extend(slot, tree, placed, asked)
        logits = logits[:wanted]
        return Pass(logits.argmax(-1), logits, None if taps is None else taps[:size])

    def _extend(
        self, slot: int, tree: TokenTree, placed: TokenTree, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """(logits [R, V], taps [T, M·H]) of one pass over a tree. Attention computes the rows of `placed`, which begins
        with it."""
        past, tokens, take = self.cache.lengths[slot], len(placed), self.buffers.take
        token_ids = take(names.TOKEN_IDS, (1, len(tree)), np.int64)
        positions = take(names.POSITIONS, (1, tokens), np.int64)
        wanted = take(names.ROWS, rows.shape, np.int64)
        bias = take(names.ATTENTION_BIAS, (1, 1, tokens, past + tokens), np.float32)
        token_ids[0], wanted[:] = tree.token_ids, rows
        np.add(placed.depths, past, out=positions[0])
        _native.attention_bias(placed.parents, past, bias[0, 0])
        inputs = {
            names.TOKEN_IDS: token_ids,
            names.POSITIONS: positions,
            names.ATTENTION_BIAS: bias,
            names.ROWS: wanted,
        }
        if self._attends_apart:
            inputs[names.ATTENDED] = attended = take(names.ATTENDED, (tokens,), np.int64)
            attended[:] = np.arange(tokens) % len(tree)
        logits = take(names.LOGITS, (len(rows), self.dims.vocab_size), np.float32)
        outputs = {names.LOGITS: logits}
        taps = None
        if self._tap_width:
            outputs[names.TAPS] = taps = take(names.TAPS, (1, len(tree), self._tap_width), np.float32)
        self.run(slot, tokens, inputs, outputs)
        return logits, None if taps is None else taps[0]


def _with_idle_row(tree: TokenTree) -> TokenTree:
    """The tree and a child of its root."""
    return TokenTree(
        np.append(tree.token_ids, tree.token_ids[:1]),
        np.append(tree.parents, np.int32(0)),
        np.append(tree.depths, np.int32(1)),
    )
