"""TensorRT-LLM's LLM API on its PyTorch backend: autoregressive, and DFlash where the engine has such a drafter.

Both run with the settings that `ddtree-trt export-trtllm` writes, read from an exported directory or made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddtree_trt.bench.contender import Outcome, Request, TokenClock
from ddtree_trt.bench.peers.base import PeerContext
from ddtree_trt.bench.settings import Case
from ddtree_trt.build.checkpoint.paths import is_gguf
from ddtree_trt.errors import MissingDependency, UsageError, install_with
from ddtree_trt.peerconfig.export import ReadExport, read_export
from ddtree_trt.peerconfig.pair import Model, served_dtype, served_pair
from ddtree_trt.peerconfig.peer import Settings
from ddtree_trt.peerconfig.trtllm import SPECULATIVE, TRTLLM
from ddtree_trt.runtime.decoding.methods import AUTOREGRESSIVE, DFLASH

PEER = "tensorrt-llm"
# Two models share the GPU; block reuse is off because every request of a benchmark starts cold.
KV_MEMORY_FRACTION = 0.3


class TensorRTLLMPeer:
    """The engine's pair under TensorRT-LLM, one model per method, one sequence at a time with cold caches."""

    def __init__(self, context: PeerContext, directory: str = "") -> None:
        """`directory` is an export, whose files may have been edited; "" takes what an export would have."""
        try:
            import tensorrt_llm
            from tensorrt_llm import llmapi
        except ImportError as error:
            raise MissingDependency(
                f"--peer tensorrt-llm needs TensorRT-LLM ({error}); {install_with('trtllm')}"
            ) from error
        self._module, self._api = tensorrt_llm, llmapi
        export = read_export(TRTLLM, Path(directory), context.manifest) if directory else _made_here(context)
        self._models: dict[str, Any] = {AUTOREGRESSIVE.name: self._load(export.model, export.plain)}
        if SPECULATIVE in export.settings:
            if not hasattr(llmapi, "DFlashDecodingConfig"):
                raise MissingDependency(
                    f"TensorRT-LLM {tensorrt_llm.__version__} has no DFlash; run: pip install -U --pre tensorrt-llm"
                )
            self._models[DFLASH.name] = self._load(export.model, export.settings)
        self.cases = tuple(Case(m, peer=PEER) for m in self._models)

    def _load(self, model: str, settings: Settings) -> Any:
        given = dict(settings)
        if SPECULATIVE in given:
            given[SPECULATIVE] = self._api.DFlashDecodingConfig(**given[SPECULATIVE])
        cache = {**given.get("kv_cache_config", {}), "free_gpu_memory_fraction": KV_MEMORY_FRACTION}
        given["kv_cache_config"] = self._api.KvCacheConfig(**{**cache, "enable_block_reuse": False})
        return self._module.LLM(**{"backend": "pytorch", **given, "model": model, "max_batch_size": 1})

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


def _made_here(context: PeerContext) -> ReadExport:
    """What an export of the engine has, of the checkpoints that a benchmark's peers load."""
    found, manifest = context.checkpoints(), context.manifest
    if is_gguf(found.target):
        raise UsageError(f"--peer tensorrt-llm reads no GGUF file; {found.target} is one: leave the peer out")
    target = str(found.target)
    if manifest.drafting.drafts != "block":
        plain = {"dtype": served_dtype(manifest), "max_seq_len": manifest.limits.max_seq_len}
        return ReadExport(target, plain, plain)
    pair = served_pair(manifest, Model(target), Model(str(found.drafter)))
    TRTLLM.check(pair)
    settings = TRTLLM.settings(pair)
    return ReadExport(target, settings, TRTLLM.plain(settings))
