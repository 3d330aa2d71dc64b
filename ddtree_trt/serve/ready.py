"""The line that says what a server does, printed when it is ready."""

from __future__ import annotations

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.runtime.async_llm import AsyncLLM
from ddtree_trt.runtime.decoding.methods import AUTO, resolve_method
from ddtree_trt.runtime.decoding.routing import engine_host_reason
from ddtree_trt.serve.options import ServeOptions


def ready_line(llm: AsyncLLM, options: ServeOptions, address: str) -> str:
    """What is served, how, within which limits, and where; the address is the last word."""
    manifest = llm.engine.manifest
    served = options.model_name or manifest.name
    waiting = "any number" if llm.max_waiting is None else llm.max_waiting
    parts = [
        f"serving {served}: {manifest.name}, {manifest.backend} {manifest.precision}{_way(llm, options)}",
        f"{_method(manifest)} unless a request says otherwise",
        f"{llm.slots} slots of {manifest.limits.max_seq_len} tokens, {waiting} may wait",
        f"{'a key is needed; ' if options.api_key else ''}{_routes(options)} on {address}",
    ]
    return "; ".join(parts)


def _routes(options: ServeOptions) -> str:
    page = "/playground, " if options.playground else ""
    return f"{page}/v1, /health and /metrics{' (vLLM names too)' if options.vllm_metrics else ''}"


def _way(llm: AsyncLLM, options: ServeOptions) -> str:
    """How the engine computes, behind its precision."""
    words = [f"{llm.engine.threads} thread{'s' * (llm.engine.threads > 1)}"]
    if llm.engine.foresee is not None:
        words.append("exact")
    if engine_host_reason(llm.engine.manifest) is None:
        words.append(f"device rounds {options.device_rounds}")
    return "".join(f", {word}" for word in words)


def _method(manifest: Manifest) -> str:
    """The method of requests that name none, and its budget."""
    drafting, limits = manifest.drafting, manifest.limits
    method = resolve_method(AUTO, manifest.drafter_kind)
    budget = method.default_budget(drafting)
    if budget is not None:
        return f"{method.name} with {budget} draft tokens a round"
    most = limits.max_tree_budget
    if drafting.drafts == "tokens":  # chains, drafted token by token
        most = min(most, drafting.longest_draft)
    return f"{method.name} with automatic budgets of up to {most} draft tokens a round"
