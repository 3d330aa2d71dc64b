"""TensorRT-LLM's LLM API on its PyTorch backend: autoregressive, and DFlash where the engine has such a drafter.

Both run with the settings that `ddtree-trt export-trtllm` writes, read from an exported directory or made here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.bench.measure import Outcome, Request
from ddtree_trt.build.checkpoint.paths import is_gguf
from ddtree_trt.errors import MissingDependency, UsageError, install_with
from ddtree_trt.runtime.decoding.methods import AUTOREGRESSIVE, DFLASH
from ddtree_trt.trtllm_export import CONFIG, PLAIN_CONFIG, RECORD, SPECULATIVE, Model, plain, settings
from workbench.peers.base import PeerContext, TokenClock

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
        model, config, single = _read(Path(directory), context.manifest) if directory else _made_here(context)
        self._models: dict[str, Any] = {AUTOREGRESSIVE.name: self._load(model, single)}
        if SPECULATIVE in config:
            if not hasattr(llmapi, "DFlashDecodingConfig"):
                raise MissingDependency(
                    f"TensorRT-LLM {tensorrt_llm.__version__} has no DFlash; run: pip install -U --pre tensorrt-llm"
                )
            self._models[DFLASH.name] = self._load(model, config)
        self.methods = list(self._models)

    def _load(self, model: str, settings: Mapping[str, Any]) -> Any:
        given = dict(settings)
        if SPECULATIVE in given:
            given[SPECULATIVE] = self._api.DFlashDecodingConfig(**given[SPECULATIVE])
        cache = {**given.get("kv_cache_config", {}), "free_gpu_memory_fraction": KV_MEMORY_FRACTION}
        given["kv_cache_config"] = self._api.KvCacheConfig(**{**cache, "enable_block_reuse": False})
        return self._module.LLM(**{"backend": "pytorch", **given, "model": model, "max_batch_size": 1})

    def describe(self) -> dict[str, str]:
        return {"tensorrt_llm": self._module.__version__, "backend": "pytorch"}

    def run(self, method: str, prompt_ids: Sequence[int], request: Request) -> Outcome:
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
        for part in self._models[method].generate_async(list(prompt_ids), params, streaming=True):
            clock.arrived(len(part.outputs[0].token_ids) - len(tokens))
            tokens = list(part.outputs[0].token_ids)
        return clock.outcome(tokens)

    def close(self) -> None:
        for model in self._models.values():
            model.shutdown()


_Export = tuple[str, dict[str, Any], dict[str, Any]]  # the target by its name, and the settings with and without drafts


def _read(directory: Path, manifest: Manifest) -> _Export:
    """An export of the engine's pair, whose files may have been edited. Raises UsageError where it is none."""
    path, again = directory / RECORD, f"write it again with: ddtree-trt export-trtllm ENGINE_DIR {directory} --force"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        config, single = (yaml.safe_load((directory / name).read_text("utf-8")) for name in (CONFIG, PLAIN_CONFIG))
        same = (record["target"], record["drafter"]) == (manifest.target.sha256, manifest.drafter.sha256)
        found = str(record["model"]), dict(config), dict(single)
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{directory} cannot be read as an export for TensorRT-LLM: {reason}; {again}") from error
    if not same:
        raise UsageError(f"{directory} is an export of another pair than that of the engine {manifest.name!r}; {again}")
    return found


def _made_here(context: PeerContext) -> _Export:
    """What an export of the engine has, of the checkpoints that a benchmark's peers load."""
    (path, drafter), manifest = context.checkpoints(), context.manifest
    if is_gguf(path):
        raise UsageError(f"--peer tensorrt-llm reads no GGUF file; {path} is one: leave the peer out")
    target = str(path)
    if manifest.drafter_kind != "dflash":
        config: dict[str, Any] = {"dtype": "auto", "max_seq_len": manifest.limits.max_seq_len}
    else:
        config = settings(manifest, Model(target), Model(str(drafter)))
    return target, config, plain(config)


def open_peer(context: PeerContext, value: str) -> TensorRTLLMPeer:
    return TensorRTLLMPeer(context, value)
