"""TensorRT-LLM's LLM API on its PyTorch backend: autoregressive, and DFlash where the engine has such a drafter.

Both run with the settings that `ddtree-trt export-trtllm` prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorrt_llm
from tensorrt_llm import llmapi

from ddtree_trt.bench.measure import Outcome, Request
from ddtree_trt.build.sources import is_gguf
from ddtree_trt.errors import UsageError
from ddtree_trt.trtllm_export import SPECULATIVE, Model, settings
from workbench.peers.base import PeerContext, TokenClock

# Two models share the GPU; block reuse is off because every request of a benchmark starts cold.
CACHE = {"free_gpu_memory_fraction": 0.3, "enable_block_reuse": False}


class TensorRTLLMPeer:
    """The engine's pair under TensorRT-LLM, one model per method, one sequence at a time with cold caches."""

    def __init__(self, context: PeerContext, _: str) -> None:
        (target, drafter), manifest = context.checkpoints(), context.manifest
        if is_gguf(target):
            raise UsageError(f"--peer tensorrt-llm reads no GGUF file; {target} is one: leave the peer out")
        model, config = str(target), {"dtype": "auto", "max_seq_len": manifest.limits.max_seq_len}
        if manifest.drafter_kind == "dflash":
            config = settings(manifest, Model(model), Model(str(drafter)))
        self._models = {"ar": _load(model, {name: value for name, value in config.items() if name != SPECULATIVE})}
        if SPECULATIVE in config:
            self._models["dflash"] = _load(model, config)
        self.methods = list(self._models)

    def describe(self) -> dict[str, str]:
        return {"tensorrt_llm": tensorrt_llm.__version__, "backend": "pytorch"}

    def run(self, method: str, prompt_ids: Sequence[int], request: Request) -> Outcome:
        greedy = {"temperature": 0.0, "top_k": 1}
        params = tensorrt_llm.SamplingParams(
            max_tokens=request.max_tokens,
            seed=request.seed,
            detokenize=False,
            ignore_eos=not request.stop_token_ids,
            stop_token_ids=list(request.stop_token_ids) or None,
            **({"temperature": request.temperature} if request.temperature > 0 else greedy),
        )
        clock, tokens = TokenClock(), list[int]()
        for part in self._models[method].generate_async(list(prompt_ids), params, streaming=True):
            clock.arrived(len(part.outputs[0].token_ids) - len(tokens))
            tokens = list(part.outputs[0].token_ids)
        return clock.outcome(tokens)

    def close(self) -> None:
        for model in self._models.values():
            model.shutdown()


def _load(model: str, given: dict[str, Any]) -> Any:
    given = {**given, "kv_cache_config": llmapi.KvCacheConfig(**{**given.get("kv_cache_config", {}), **CACHE})}
    if SPECULATIVE in given:
        given[SPECULATIVE] = llmapi.DFlashDecodingConfig(**given[SPECULATIVE])
    return tensorrt_llm.LLM(**{"backend": "pytorch", **given, "model": model, "max_batch_size": 1})
