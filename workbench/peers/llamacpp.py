"""llama.cpp on a GGUF file, by the C interface that llama-cpp-python has: several sequences share a pass."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.bench.measure import Outcome, Request
from ddtree_trt.errors import DDTreeError, UsageError
from workbench.peers.base import PeerContext, TokenClock

_quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)


class LlamaCpp:
    """The target of an engine in a GGUF file, with a cache for each of `sequences`."""

    def __init__(self, path: Path, manifest: Manifest, threads: int, *, sequences: int, length: int) -> None:
        """`length`: tokens of a cache. Raises UsageError for another model's file, DDTreeError where it cannot load."""
        if not path.is_file():
            raise UsageError(f"llama.cpp: {str(path)!r} is no file; give a GGUF file of the engine's target")
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
        model, shape = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
        model.n_gpu_layers = 0 if manifest.backend == "onnxruntime" else -1
        shape.n_ctx = shape.n_batch = sequences * length
        shape.n_seq_max = shape.n_outputs_max = sequences
        shape.n_threads = shape.n_threads_batch = threads
        self._lengths = [0] * sequences
        with ExitStack() as opened:
            self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model)
            if self._model is None:
                raise DDTreeError(f"llama.cpp cannot load {path}; is it a whole GGUF file of a model?")
            opened.callback(llama_cpp.llama_model_free, self._model)
            self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
            found = llama_cpp.llama_model_n_layer(self._model), llama_cpp.llama_model_n_embd(self._model), self._vocab
            dims = manifest.target_dims
            if found != (expected := (dims.num_layers, dims.hidden_size, dims.vocab_size)):
                raise UsageError(
                    f"llama.cpp: {path} has layers, width and vocabulary {found}, the engine's target {expected}; give "
                    "the GGUF file of the same model"
                )
            self._context = llama_cpp.llama_init_from_model(self._model, shape)
            if self._context is None:
                raise DDTreeError(f"llama.cpp has no memory for {sequences} sequences of {length} tokens")
            opened.callback(llama_cpp.llama_free, self._context)
            self._batch = llama_cpp.llama_batch_init(sequences * length, 0, 1)
            opened.callback(llama_cpp.llama_batch_free, self._batch)
            self.close = opened.pop_all().close

    @property
    def type(self) -> str:
        """The file's type, such as Q8_0."""
        text = ctypes.create_string_buffer(128)
        llama_cpp.llama_model_desc(self._model, text, len(text))  # "llama 256M Q8_0"
        return " ".join(text.value.decode().split()[2:]).removeprefix("all ")

    def step(self, tokens: Mapping[int, Sequence[int]]) -> list[NDArray[np.float32]]:
        """Append tokens to sequences, by their numbers, in one pass; the logits [V] behind each one's last token, which
        hold until the next step."""
        batch, lasts = self._batch, list[int]()
        batch.n_tokens = 0
        for sequence, ids in tokens.items():
            for token in ids:
                row = batch.n_tokens
                batch.token[row], batch.pos[row], batch.logits[row] = token, self._lengths[sequence], False
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
                self._lengths[sequence] += 1
                batch.n_tokens += 1
            lasts.append(batch.n_tokens - 1)
            batch.logits[lasts[-1]] = True
        if status := llama_cpp.llama_decode(self._context, batch):
            raise DDTreeError(
                f"llama.cpp failed in a pass over {batch.n_tokens} tokens: llama_decode returned {status}"
            )
        rows = (llama_cpp.llama_get_logits_ith(self._context, last) for last in lasts)
        return [np.ctypeslib.as_array(row, (self._vocab,)) for row in rows]

    def truncate(self, sequence: int, length: int = 0) -> None:
        """Keep the first `length` tokens of a sequence."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), sequence, length, -1)
        self._lengths[sequence] = length


def quantize(source: Path, file: Path, threads: int) -> Path:
    """Write a GGUF file's tensors as Q8_0 to `file`, which is returned. Raises UsageError where `source` is none."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize, options.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True, threads
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
    if not source.is_file() or llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), options):
        raise UsageError(f"llama.cpp cannot make {source} Q8_0; build the engine from a GGUF file, which it reads")
    return file


def describe(threads: int) -> dict[str, str]:
    features = llama_cpp.llama_print_system_info().decode().split("|")
    return {
        "llama-cpp-python": llama_cpp.__version__,
        "threads": str(threads),
        "features": " ".join(part.strip() for part in features if "= 1" in part),
    }


class LlamaCppPeer:
    """One request at a time. The file has a type of its own (Q8_0, F32 …), which names the case: several files can be
    measured in one run."""

    def __init__(self, context: PeerContext, value: str) -> None:
        manifest, self._threads = context.manifest, context.threads
        length = manifest.limits.max_seq_len
        self._model = LlamaCpp(Path(value), manifest, self._threads, sequences=1, length=length)
        self.methods = [self._model.type]

    def describe(self) -> dict[str, str]:
        return describe(self._threads)

    def run(self, method: str, prompt_ids: Sequence[int], request: Request) -> Outcome:
        self._model.truncate(0)
        clock, random, tokens = TokenClock(), np.random.default_rng(request.seed), list(prompt_ids)
        while True:
            (logits,) = self._model.step({0: tokens[-1:] if len(tokens) > len(prompt_ids) else tokens})
            if request.temperature > 0:
                shares = np.exp((logits - logits.max()) / request.temperature, dtype=np.float64).cumsum()
                tokens.append(int(shares.searchsorted(random.random() * shares[-1], side="right")))
            else:
                tokens.append(int(logits.argmax()))
            clock.arrived(1)
            if len(tokens) - len(prompt_ids) == request.max_tokens or tokens[-1] in request.stop_token_ids:
                return clock.outcome(tokens[len(prompt_ids) :])

    def close(self) -> None:
        self._model.close()
