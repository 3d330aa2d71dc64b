"""One network in ONNX Runtime: a session with its cache, shared between past and present.

Rules of `GroupQueryAttention` this file keeps (a wrong value gives garbage without an error):
seqlens_k is past + T − 1 of each sequence, total_length the largest past + T, the bias exactly that wide, and the past
and present of a layer are one buffer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt import tensors as names
from ddtree_trt.artifact import TransformerDims
from ddtree_trt.errors import ArtifactError, EngineError
from ddtree_trt.runtime.drafters import Pass
from ddtree_trt.runtime.kv import SlotCache
from ddtree_trt.runtime.tree import TokenTree


class Network:
    """A session and the cache of its slots: runs passes over one slot at a time."""

    def __init__(self, path: Path, dims: TransformerDims, slots: int, rows: int, threads: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        try:
            self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exceptions share no useful base
            raise ArtifactError(f"ONNX Runtime {ort.__version__} cannot load {path}: {error}; rebuild it") from error
        self.dims = dims
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
        self,
        slot: int,
        tokens: int,
        inputs: dict[str, NDArray[Any]],
        outputs: dict[str, NDArray[Any]],
        *,
        scratch: int = 0,
    ) -> None:
        """Write `tokens` rows behind the slot's committed ones, filling `outputs`; nothing is committed.

        `scratch`: rows of the cache the graph writes behind those for itself.
        """
        self.cache.check_room(slot, tokens + scratch)
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


class LanguageModel(Network):
    """A network with the target's graph: a tree of tokens in, logits out."""

    def __init__(
        self, path: Path, dims: TransformerDims, slots: int, rows: int, threads: int, *, taps: int = 0
    ) -> None:
        """`taps` is M, the number of tapped layers."""
        super().__init__(path, dims, slots, rows, threads)
        self._tap_width = taps * dims.hidden_size
        self._scratch = _Scratch()

    def extend(self, slot: int, tree: TokenTree, rows: NDArray[np.int64]) -> Pass:
        """Write a tree's T rows behind the slot's committed ones; logits for the wanted rows [R]."""
        past, tokens, take = self.cache.lengths[slot], len(tree), self._scratch.take
        bias = take("bias", (1, 1, tokens, past + tokens), np.float32)
        _native.attention_bias(tree.parents, past, bias[0, 0])
        inputs = {
            names.TOKEN_IDS: tree.token_ids[None],
            names.POSITIONS: (tree.depths.astype(np.int64) + past)[None],
            names.ATTENTION_BIAS: bias,
            names.ROWS: rows,
        }
        logits = take("logits", (len(rows), self.dims.vocab_size), np.float32)
        choices = take("choices", (len(rows),), np.int64)
        outputs: dict[str, NDArray[Any]] = {names.LOGITS: logits, names.CHOICES: choices}
        taps = None
        if self._tap_width:
            outputs[names.TAPS] = taps = take("taps", (1, tokens, self._tap_width), np.float32)
        self.run(slot, tokens, inputs, outputs)
        return Pass(choices, logits, None if taps is None else taps[0])
