"""llama.cpp on a GGUF file: autoregressive, and speculation with a smaller file as its draft model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_trt.bench.measure import Outcome, Request
from ddtree_trt.errors import DDTreeError, MissingDependency, UsageError, install_with
from ddtree_trt.runtime.text.codec import TextCodec
from workbench.peers.base import PeerContext, TokenClock

PEER = "llama-cpp"
DRAFT_TOKENS = 4
"""Tokens that the draft model proposes a round: on processors, where a batch is not free, short drafts pay best."""
BUFFER = 32
"""Bytes of a token's text from which llama-cpp-python returns none."""
COMPARED_TOKENS = 2000
"""Tokens, evenly over the vocabulary, whose text must be the engine's."""


class _Drafter:
    """A draft model as llama-cpp-python calls one: the tokens so far in, greedy drafts out."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.before: Callable[[], None] = lambda: None  # called at the end of a round, when its tokens have all come

    def __call__(self, input_ids: Any, /, **_: Any) -> Any:
        self.before()
        drafts = islice(self.model.generate(input_ids.tolist(), temp=0.0), DRAFT_TOKENS)
        return np.fromiter(drafts, np.intc)


class LlamaCppPeer:
    """A GGUF file under llama.cpp through llama-cpp-python, on the engine's prompts by their token ids.

    The file has a type of its own (Q8_0, F32 …), which names the case: several files can be measured in one run. With a
    draft file, a second case decodes speculatively: the draft model proposes DRAFT_TOKENS greedy tokens a round.
    """

    def __init__(self, context: PeerContext, value: str) -> None:
        model, draft = _files(value)
        self._library = _library()
        self._context = context
        self._open = ExitStack()
        try:
            self._plain = self._load(model)
            self._check(self._plain, model, same_model=True)
            name = self._type_of(self._plain)
            self._models: dict[str, Any] = {name: self._plain}
            self._drafter: _Drafter | None = None
            if draft is not None:
                self._drafter = _Drafter(self._load(draft))
                self._check(self._drafter.model, draft, same_model=False)
                self._models[f"{name}-draft"] = self._load(model, self._drafter)
        except BaseException:
            self.close()
            raise
        self.methods = list(self._models)

    def _load(self, path: Path, drafter: Any = None) -> Any:
        context = self._context
        try:
            model = self._library.Llama(
                str(path),
                n_ctx=context.manifest.limits.max_seq_len + DRAFT_TOKENS,
                n_threads=context.threads,
                n_threads_batch=context.threads,
                n_gpu_layers=0 if context.manifest.backend == "onnxruntime" else -1,
                draft_model=drafter,
                verbose=False,
            )
        except (ValueError, RuntimeError) as error:
            raise DDTreeError(f"llama.cpp cannot load {path}: {error}; is it a whole GGUF file of a model?") from error
        return self._open.enter_context(closing(model))

    def _check(self, model: Any, path: Path, *, same_model: bool) -> None:
        """Raises UsageError where the file is of another model or has another vocabulary than the engine."""
        dims, codec = self._context.manifest.target_dims, TextCodec(self._context.engine, {})
        layers = self._library.llama_model_n_layer(model.model)
        found = (layers, model.n_embd())
        if same_model and found != (dims.num_layers, dims.hidden_size):
            raise UsageError(
                f"--peer {PEER}: {path} has {found[0]} layers of width {found[1]}, the engine's target "
                f"{dims.num_layers} of {dims.hidden_size}; give the GGUF file of the same model"
            )
        if model.n_vocab() != dims.vocab_size:
            raise UsageError(
                f"--peer {PEER}: {path} has a vocabulary of {model.n_vocab()} tokens, the engine {dims.vocab_size}; "
                "give a file with the same tokenizer"
            )
        for token in range(0, dims.vocab_size, max(1, dims.vocab_size // COMPARED_TOKENS)):
            ours = codec.decode([token], skip_special_tokens=False)
            theirs = model.detokenize([token], special=True).decode(errors="replace")
            if len(ours.encode()) < BUFFER and ours.strip() != theirs.strip():
                raise UsageError(
                    f"--peer {PEER}: token {token} is {theirs!r} in {path} and {ours!r} in the engine; give a file "
                    "with the same tokenizer"
                )

    def _type_of(self, model: Any) -> str:
        """The file's type by llama.cpp's name, such as Q8_0."""
        number = model.metadata.get("general.file_type")
        prefixes = ("LLAMA_FTYPE_MOSTLY_", "LLAMA_FTYPE_ALL_")
        for prefix in prefixes:
            for name in dir(self._library):
                if name.startswith(prefix) and str(getattr(self._library, name)) == number:
                    return name.removeprefix(prefix)
        return "model"

    def describe(self) -> dict[str, str]:
        features = self._library.llama_print_system_info().decode()
        return {
            "llama-cpp-python": self._library.__version__,
            "threads": str(self._plain.n_threads),
            "features": " ".join(part.strip() for part in features.split("|") if "= 1" in part),
            **({"draft tokens": str(DRAFT_TOKENS)} if self._drafter else {}),
        }

    def run(self, method: str, prompt_ids: Sequence[int], request: Request) -> Outcome:
        model, drafter = self._models[method], self._drafter if method.endswith("-draft") else None
        model.reset()  # or it would reuse what it has of the prompt
        model.set_seed(request.seed)
        clock, tokens, counted = TokenClock(), list[int](), 0

        def round_ended() -> None:
            nonlocal counted
            clock.arrived(len(tokens) - counted)
            counted = len(tokens)

        if drafter is not None:
            drafter.model.reset()
            drafter.before = round_ended
        whole = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": request.temperature}
        for token in model.generate(list(prompt_ids), **whole):
            tokens.append(int(token))
            if drafter is None:
                round_ended()
            if len(tokens) == request.max_tokens or token in request.stop_token_ids:
                break
        round_ended()
        return clock.outcome(tokens)

    def close(self) -> None:
        self._open.close()


def _files(value: str) -> tuple[Path, Path | None]:
    """The model and the draft model of MODEL.gguf or MODEL.gguf,DRAFT.gguf."""
    names = value.split(",")
    if len(names) > 2 or not all(names):
        raise UsageError(f"--peer {PEER} takes MODEL.gguf or MODEL.gguf,DRAFT.gguf, not {value!r}")
    paths = [Path(name) for name in names]
    for path in paths:
        if not path.is_file():
            raise UsageError(f"--peer {PEER}: {path} is no file; give a GGUF file of the engine's target")
    return paths[0], paths[1] if len(paths) == 2 else None


def _library() -> Any:
    try:
        return importlib.import_module("llama_cpp")
    except (ImportError, OSError, RuntimeError) as error:  # the last two: the shared library does not load
        raise MissingDependency(f"--peer {PEER} needs llama-cpp-python ({error}); {install_with('peers')}") from error


def open_peer(context: PeerContext, value: str) -> LlamaCppPeer:
    return LlamaCppPeer(context, value)
