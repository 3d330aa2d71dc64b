"""llama.cpp on a GGUF file: autoregressive, and speculation with a smaller file as its draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from ddtree_trt.bench.measure import Outcome, Request
from ddtree_trt.errors import DDTreeError, UsageError
from workbench.peers.base import PeerContext, TokenClock

DRAFT_TOKENS = 4  # of a round: on processors, where a batch is not free, short drafts pay best


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
        """`value`: MODEL.gguf or MODEL.gguf,DRAFT.gguf."""
        paths = [Path(name) for name in value.split(",")]
        if len(paths) > 2:
            raise UsageError(f"--peer llama-cpp takes MODEL.gguf or MODEL.gguf,DRAFT.gguf, not {value!r}")
        for path in paths:
            if not path.is_file():
                raise UsageError(f"--peer llama-cpp: {str(path)!r} is no file; give a GGUF file of the engine's target")
        self._context, self._drafter = context, None
        with ExitStack() as opened:
            plain = self._load(opened, paths[0])
            dims = context.manifest.target_dims
            if (found := llama_cpp.llama_model_n_layer(plain.model), plain.n_embd()) != (
                expected := (dims.num_layers, dims.hidden_size)
            ):
                raise UsageError(
                    f"--peer llama-cpp: {paths[0]} has layers and width {found}, the engine's target {expected}; give "
                    "the GGUF file of the same model"
                )
            self._models = {_type_of(plain): plain}
            if len(paths) == 2:
                self._drafter = _Drafter(self._load(opened, paths[1]))
                self._models[f"{_type_of(plain)}-draft"] = self._load(opened, paths[0], self._drafter)
            self._open = opened.pop_all()
        self.methods = list(self._models)

    def _load(self, opened: ExitStack, path: Path, drafter: Any = None) -> Any:
        manifest, threads = self._context.manifest, self._context.threads
        try:
            model = llama_cpp.Llama(
                str(path),
                n_ctx=manifest.limits.max_seq_len + DRAFT_TOKENS,
                n_threads=threads,
                n_threads_batch=threads,
                n_gpu_layers=0 if manifest.backend == "onnxruntime" else -1,
                draft_model=drafter,
                verbose=False,
            )
        except (ValueError, RuntimeError) as error:
            raise DDTreeError(f"llama.cpp cannot load {path}: {error}; is it a whole GGUF file of a model?") from error
        opened.enter_context(closing(model))
        if (found := model.n_vocab()) != (expected := manifest.target_dims.vocab_size):
            raise UsageError(
                f"--peer llama-cpp: {path} has a vocabulary of {found} tokens, the engine {expected}; give a file with "
                "the same tokenizer"
            )
        return model

    def describe(self) -> dict[str, str]:
        features = llama_cpp.llama_print_system_info().decode()
        return {
            "llama-cpp-python": llama_cpp.__version__,
            "threads": str(self._models[self.methods[0]].n_threads),
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


def _type_of(model: Any) -> str:
    """The file's type by llama.cpp's name, such as Q8_0."""
    number = model.metadata.get("general.file_type")
    for prefix in ("LLAMA_FTYPE_MOSTLY_", "LLAMA_FTYPE_ALL_"):
        for name, value in vars(llama_cpp).items():
            if name.startswith(prefix) and str(value) == number:
                return name.removeprefix(prefix)
    return "model"
