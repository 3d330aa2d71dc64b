"""Hugging Face transformers: `generate`, prompt lookup, and assisted generation where there is an assistant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from ddtree_trt.bench.measure import Outcome, Request
from ddtree_trt.build.sources import is_gguf
from workbench.peers.base import PeerContext, TokenClock

LOOKUP_TOKENS = 10  # what the transformers documentation uses


class _Streamer(TokenClock):
    """A TokenClock as transformers calls a streamer: the first call gets the prompt."""

    tokens: list[int] | None = None

    def put(self, value: Any) -> None:
        if self.tokens is None:
            self.tokens = []
        else:
            ids = value.flatten().tolist()
            self.arrived(len(ids))
            self.tokens += ids

    def end(self) -> None:
        pass


class TransformersPeer:
    """The target under transformers, in the engine's precision and with PyTorch SDPA attention."""

    def __init__(self, context: PeerContext, _: str) -> None:
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(context.threads)
        on_gpu = context.manifest.backend != "onnxruntime" and torch.cuda.is_available()
        self._device = "cuda" if on_gpu else "cpu"  # the engine's
        self._options = {"dtype": getattr(torch, context.dtype), "attn_implementation": "sdpa"}
        target, drafter = context.checkpoints()
        self._target = self._load(target)
        assistant = Path(context.assistant) if context.assistant else None
        if assistant is None and context.manifest.drafting.drafts == "tokens":
            assistant = drafter
        self._extra: dict[str, dict[str, Any]] = {
            "generate": {},
            "prompt-lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
            **({"assisted": {"assistant_model": self._load(assistant)}} if assistant else {}),
        }
        self.methods = list(self._extra)

    def _load(self, path: Path) -> Any:
        where = {"gguf_file": path.name} if is_gguf(path) else {}
        folder = path.parent if where else path
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, **where, **self._options)
        return model.eval().to(self._device)

    def describe(self) -> dict[str, str]:
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "device": self._device,
            "dtype": str(self._options["dtype"]),
            "threads": str(torch.get_num_threads()),
        }

    def run(self, method: str, prompt_ids: Sequence[int], request: Request) -> Outcome:
        torch.manual_seed(request.seed)
        ids = torch.tensor([list(prompt_ids)], device=self._device)
        stops = list(request.stop_token_ids) or None
        sampling = {"do_sample": True, "temperature": request.temperature, "top_k": 0, "top_p": 1.0}
        config = transformers.GenerationConfig(
            max_new_tokens=request.max_tokens,
            eos_token_id=stops,
            pad_token_id=stops[0] if stops else 0,
            **(sampling if request.temperature > 0 else {"do_sample": False}),
        )
        clock, mask = _Streamer(), torch.ones_like(ids)
        self._target.generate(ids, attention_mask=mask, generation_config=config, streamer=clock, **self._extra[method])
        return clock.outcome(clock.tokens)

    def close(self) -> None:
        self._target = None
        self._extra.clear()
