"""TensorRT-LLM's LLM API on its PyTorch backend: autoregressive, and DFlash where the engine has such a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddtree_trt.bench.contender import Outcome, Request, TokenClock
from ddtree_trt.bench.peers.base import PeerContext
from ddtree_trt.bench.settings import Case
from ddtree_trt.build.checkpoint.paths import is_gguf
from ddtree_trt.errors import MissingDependency, UsageError, install_with
from ddtree_trt.runtime.decoding.methods import AUTOREGRESSIVE, DFLASH

PEER = "tensorrt-llm"
# Two models share the GPU; block reuse is off because every request of a benchmark starts cold.
KV_MEMORY_FRACTION = 0.3


class TensorRTLLMPeer:
    """The engine's checkpoints under TensorRT-LLM, one model per method."""

    def __init__(self, context: PeerContext) -> None:
        try:
            import tensorrt_llm
            from tensorrt_llm import llmapi
        except ImportError as error:
            raise MissingDependency(
                f"--peer tensorrt-llm needs TensorRT-LLM ({error}); {install_with('trtllm')}"
            ) from error
        self._module, self._api = tensorrt_llm, llmapi
        self._context = context
        directories, manifest = context.checkpoints(), context.manifest
        if is_gguf(directories.target):
            raise UsageError(f"--peer tensorrt-llm reads no GGUF file; {directories.target} is one: leave the peer out")
        self._target = str(directories.target)
        self._models: dict[str, Any] = {AUTOREGRESSIVE.name: self._load(None)}
        if manifest.drafter_kind == "dflash":
            if not hasattr(llmapi, "DFlashDecodingConfig"):
                raise MissingDependency(
                    f"TensorRT-LLM {tensorrt_llm.__version__} has no DFlash; run: pip install -U tensorrt-llm"
                )
            config = llmapi.DFlashDecodingConfig(
                max_draft_len=manifest.dflash.draft_length, speculative_model=str(directories.drafter)
            )
            self._models[DFLASH.name] = self._load(config)
        self.cases = tuple(Case(m, peer=PEER) for m in self._models)

    def _load(self, speculative: Any) -> Any:
        limits = self._context.manifest.limits
        return self._module.LLM(
            model=self._target,
            backend="pytorch",
            dtype=self._context.dtype,
            max_seq_len=limits.max_seq_len,
            max_batch_size=1,
            kv_cache_config=self._api.KvCacheConfig(
                free_gpu_memory_fraction=KV_MEMORY_FRACTION, enable_block_reuse=False
            ),
            **({} if speculative is None else {"speculative_config": speculative}),
        )

    def describe(self) -> dict[str, str]:
        return {"tensorrt_llm": self._module.__version__, "backend": "pytorch"}

    def run(self, case: Case, prompt_ids: Sequence[int], request: Request) -> Outcome:
        greedy = {"temperature": 0.0, "top_k": 1}
        params = self._module.SamplingParams(
            max_tokens=request.max_tokens,
            seed=request.seed,
            detokenize=False,
            ignore_eos=not request.stop_token_ids,
            stop_token_ids=list(request.stop_token_ids) or None,
            **({"temperature": request.temperature} if request.temperature > 0 else greedy),
        )
        clock = TokenClock()
        tokens: list[int] = []
        for part in self._models[case.method].generate_async(list(prompt_ids), params, streaming=True):
            clock.arrived(len(part.outputs[0].token_ids) - len(tokens))
            tokens = list(part.outputs[0].token_ids)
        return clock.outcome(tokens)

    def close(self) -> None:
        for model in self._models.values():
            model.shutdown()
