"""Hugging Face transformers: `generate`, prompt lookup, and assisted generation where there is an assistant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddtree_trt.bench.measure import Outcome, Request
from ddtree_trt.errors import MissingDependency, install_with
from workbench.peers.base import PeerContext, TokenClock, pretrained

LOOKUP_TOKENS = 10  # what the transformers documentation uses


class _Streamer:
    """transformers' streamer interface over a TokenClock: the first call gets the prompt."""

    def __init__(self) -> None:
        self.clock = TokenClock()
        self.tokens: list[int] = []
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        if self._prompt_seen:
            ids = value.flatten().tolist()
            self.clock.arrived(len(ids))
            self.tokens += ids
        self._prompt_seen = True

    def end(self) -> None:
        pass


class TransformersPeer:
    """The target under transformers, in the engine's precision and with PyTorch SDPA attention."""

    def __init__(self, context: PeerContext) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise MissingDependency(
                f"--peer hf needs PyTorch and transformers ({error}); {install_with('torch')}"
            ) from error
        self._torch, self._transformers = torch, transformers
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(context.threads)
        on_gpu = context.manifest.backend != "onnxruntime" and torch.cuda.is_available()
        self._device = "cuda" if on_gpu else "cpu"  # the engine's
        self._options = {"dtype": getattr(self._torch, context.dtype), "attn_implementation": "sdpa"}
        target, drafter = context.checkpoints()
        self._target = self._load(target)
        assistant = Path(context.assistant) if context.assistant else None
        if assistant is None and context.manifest.drafting.drafts == "tokens":
            assistant = drafter
        self._assistant = None if assistant is None else self._load(assistant)
        self.methods = ["generate", "prompt-lookup", *(["assisted"] if assistant else [])]

    def _load(self, path: Path) -> Any:
        model = self._transformers.AutoModelForCausalLM.from_pretrained(**pretrained(path), **self._options)
        return model.eval().to(self._device)

    def describe(self) -> dict[str, str]:
        return {
            "transformers": self._transformers.__version__,
            "torch": self._torch.__version__,
            "device": self._device,
            "dtype": str(self._options["dtype"]),
            "threads": str(self._torch.get_num_threads()),
        }

    def run(self, method: str, prompt_ids: Sequence[int], request: Request) -> Outcome:
        torch = self._torch
        torch.manual_seed(request.seed)
        ids = torch.tensor([list(prompt_ids)], device=self._device)
        stops = list(request.stop_token_ids) or None
        sampling = {"do_sample": True, "temperature": request.temperature, "top_k": 0, "top_p": 1.0}
        extra: dict[str, Any] = {}
        if method == "prompt-lookup":
            extra["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        elif method == "assisted":
            extra["assistant_model"] = self._assistant
        config = self._transformers.GenerationConfig(
            max_new_tokens=request.max_tokens,
            eos_token_id=stops,
            pad_token_id=stops[0] if stops else 0,
            **(sampling if request.temperature > 0 else {"do_sample": False}),
        )
        streamer = _Streamer()
        self._target.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=streamer, **extra
        )
        return streamer.clock.outcome(streamer.tokens)

    def close(self) -> None:
        self._target = self._assistant = None


def open_peer(context: PeerContext, value: str) -> TransformersPeer:
    return TransformersPeer(context)
