"""TensorRT-LLM's LLM API on its PyTorch backend: autoregressive, and DFlash where the engine has such a drafter.

Both run with the settings that `ddtree-trt export-trtllm` writes, read from an exported directory or made here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorrt_llm
import yaml
from tensorrt_llm import llmapi

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.bench.measure import Outcome, Request
from ddtree_trt.build.checkpoint.paths import is_gguf
from ddtree_trt.errors import UsageError
from ddtree_trt.trtllm_export import CONFIG, PLAIN_CONFIG, RECORD, SPECULATIVE, Model, plain, settings
from workbench.peers.base import PeerContext, TokenClock

# Two models share the GPU; block reuse is off because every request of a benchmark starts cold.
CACHE = {"free_gpu_memory_fraction": 0.3, "enable_block_reuse": False}
_Export = tuple[str, dict[str, Any], dict[str, Any]]  # the target by its name, and the settings with and without drafts


class TensorRTLLMPeer:
    """The engine's pair under TensorRT-LLM, one model per method, one sequence at a time with cold caches."""

    def __init__(self, context: PeerContext, directory: str) -> None:
        """`directory` is an export, whose files may have been edited; "" takes what an export would have."""
        model, config, single = _read(Path(directory), context.manifest) if directory else _made_here(context)
        self._models = {"ar": _load(model, single)}
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


def _read(directory: Path, manifest: Manifest) -> _Export:
    """An export of the engine's pair. Raises UsageError where it is none."""
    again = f"write it again with: ddtree-trt export-trtllm ENGINE_DIR {directory} --force"
    try:
        record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        config, single = (
            dict(yaml.safe_load((directory / name).read_text("utf-8"))) for name in (CONFIG, PLAIN_CONFIG)
        )
        pair, model = (record["target"], record["drafter"]), str(record["model"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{directory} cannot be read as an export for TensorRT-LLM: {reason}; {again}") from error
    if pair != (manifest.target.sha256, manifest.drafter.sha256):
        raise UsageError(f"{directory} is an export of another pair than that of the engine {manifest.name!r}; {again}")
    return model, config, single


def _made_here(context: PeerContext) -> _Export:
    """What an export of the engine has, of the checkpoints that a benchmark's peers load."""
    (target, drafter), manifest = context.checkpoints(), context.manifest
    if is_gguf(target):
        raise UsageError(f"--peer tensorrt-llm reads no GGUF file; {target} is one: leave the peer out")
    config: dict[str, Any] = {"dtype": "auto", "max_seq_len": manifest.limits.max_seq_len}
    if manifest.drafter_kind == "dflash":
        config = settings(manifest, Model(str(target)), Model(str(drafter)))
    return str(target), config, plain(config)
