"""A stand-in for llama-cpp-python's C interface, whose greedy token is a function of all tokens before it."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ddtree_trt.models.decoder import TransformerDims


def greedy(tokens: Sequence[int], vocab: int) -> int:
    """What the stand-in says behind these tokens."""
    return sum((place + 3) * (token + 5) for place, token in enumerate(tokens)) % vocab


class FakeLlamaCpp(SimpleNamespace):
    """The module `llama_cpp`, as far as it is called. `opened`: files and contexts that are not freed; `passes`: rows
    of each call of `llama_decode`. Files of these names differ: short.gguf in its vocabulary, wide.gguf in its width,
    broken.gguf cannot be loaded."""

    LLAMA_FTYPE_MOSTLY_Q8_0 = 7
    __version__ = "0.3.36"

    def __init__(self, dims: TransformerDims) -> None:
        self.dims, self.opened, self.passes, self.shapes = dims, list[Any](), list[int](), list[Any]()
        self.llama_model_default_params = self.llama_context_default_params = SimpleNamespace
        self.llama_model_quantize_default_params = SimpleNamespace
        self.llama_log_callback = self.llama_model_get_vocab = self.llama_get_memory = lambda given: given
        self.llama_log_set = lambda callback, data: None
        self.llama_print_system_info = lambda: b"CPU : AVX2 = 1 | AVX512 = 0 | "
        self.llama_free = self.llama_model_free = self.opened.remove
        self.llama_batch_free = lambda batch: self.opened.remove(batch)

    def llama_model_quantize(self, source: bytes, file: bytes, options: Any) -> int:
        Path(file.decode()).write_bytes(b"GGUF")
        return 0

    def llama_batch_init(self, rows: int, embedding: int, sequences: int) -> Any:
        fields = {name: [0] * rows for name in ("token", "pos", "n_seq_id", "logits")}
        self.opened.append(SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(rows)], **fields))
        return self.opened[-1]

    def llama_model_load_from_file(self, path: bytes, options: Any) -> Any:
        if (name := Path(path.decode()).name) == "broken.gguf":
            return None
        self.opened.append(name)
        return name

    def llama_vocab_n_tokens(self, model: str) -> int:
        return 3 if model == "short.gguf" else self.dims.vocab_size

    def llama_model_n_embd(self, model: str) -> int:
        return self.dims.hidden_size + (model == "wide.gguf")

    def llama_model_n_layer(self, model: str) -> int:
        return self.dims.num_layers

    def llama_model_desc(self, model: str, text: Any, size: int) -> None:
        text.value = b"llama 1B all F32" if model == "f32.gguf" else b"llama 1B Q8_0"

    def llama_init_from_model(self, model: str, shape: Any) -> Any:
        self.shapes.append(shape)
        self.opened.append(SimpleNamespace(caches=[[] for _ in range(shape.n_seq_max)], logits={}))
        return self.opened[-1]

    def llama_decode(self, context: Any, batch: Any) -> int:
        self.passes.append(batch.n_tokens)
        context.logits = {}
        for row in range(batch.n_tokens):
            cache = context.caches[batch.seq_id[row][0]]
            if batch.pos[row] != len(cache) or batch.n_seq_id[row] != 1:
                return -1
            cache.append(batch.token[row])
            if batch.logits[row]:
                context.logits[row] = np.eye(1, self.dims.vocab_size, greedy(cache, self.dims.vocab_size), np.float32)[
                    0
                ]
        return 0

    def llama_get_logits_ith(self, context: Any, row: int) -> Any:
        return context.logits[row]

    def llama_memory_seq_rm(self, context: Any, sequence: int, start: int, end: int) -> bool:
        del context.caches[sequence][start:]
        return end == -1
