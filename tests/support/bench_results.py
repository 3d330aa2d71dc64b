"""Benchmark results a test can write down."""

from __future__ import annotations

from typing import Any

from ddtree_trt.bench.environment import EngineInfo, Environment
from ddtree_trt.bench.result import BenchResult, Part, Sample
from ddtree_trt.bench.settings import BenchSettings, Shard

STAGES = {"prefill": 0.0, "draft": 1e-3, "tree_build": 1e-4, "tree_compile": 1e-4, "verify": 4e-3, "commit": 1e-4}


def make_sample(case: str, prompt: str = "set/0", *, token_ms: float = 1.0, **changes: Any) -> Sample:
    """A request of 21 tokens, 20 of them decoded, at `token_ms` each."""
    values: dict[str, Any] = {
        "case": case,
        "temperature": 0.0,
        "source": prompt.partition("/")[0],
        "prompt": prompt,
        "repeat": 0,
        "order": 0,
        "prompt_tokens": 8,
        "output_tokens": 21,
        "decoded_tokens": 20,
        "first_token_s": 0.002,
        "decode_s": 20 * token_ms / 1000,
        "acceptance_lengths": (1,) * 20 if case.endswith("ar") else (4,) * 5,
        "mean_budget": None,
        "stage_s": {},
        "output_digest": "same",
    }
    return Sample(**{**values, **changes})


def make_environment(**changes: Any) -> Environment:
    values: dict[str, Any] = {
        "machine": "abacus",
        "cores": 2,
        "cpu_features": ("beads",),
        "gpus": (),
        "platform": "Linux",
        "python": "3.11",
        "product_version": "0",
        "packages": {"numpy": "2"},
        "load_1min": 0.1,
        "started": "2026-01-01T00:00:00+00:00",
    }
    return Environment(**{**values, **changes})


def make_engine(**changes: Any) -> EngineInfo:
    values: dict[str, Any] = {
        "name": "pair",
        "backend": "onnxruntime",
        "precision": "fp32",
        "target": "target",
        "target_sha256": "t",
        "drafter": "drafter",
        "drafter_sha256": "d",
        "block_size": 8,
        "max_seq_len": 128,
        "max_tree_budget": 64,
        "digest": "e",
        "fingerprint": "f",
        "threads": 1,
    }
    return EngineInfo(**{**values, **changes})


def make_result(*samples: Sample, shard: Shard = Shard(), **settings: Any) -> BenchResult:  # noqa: B008
    chosen = {"engine": "engines/pair", "budgets": (4, 16, "auto"), **settings}
    contenders = {"": {"threads": "1"}, "hf": {"torch": "2"}}
    return BenchResult(
        settings=BenchSettings(**chosen),
        engine=make_engine(),
        prompts_digest="p",
        prompt_count=2,
        parts=(Part(shard, make_environment(), contenders),),
        samples=samples,
    )
