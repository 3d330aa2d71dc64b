"""Replays of a result: the same settings measured again, and the ratios of the figures."""

from __future__ import annotations

import dataclasses

from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.bench.reporting.markdown import Table
from ddtree_trt.bench.reporting.summary import Row, summarize
from ddtree_trt.bench.result import BenchResult
from ddtree_trt.bench.runner import run_bench
from ddtree_trt.bench.settings import Shard


def replay(old: BenchResult, engine: str | None = None, progress: Progress = no_progress) -> BenchResult:
    """The result of running `old`'s settings, all shards of them, on its engine or on the one given.

    Raises UsageError when the prompts are not the ones it ran, and whatever `run_bench` raises.
    """
    settings = old.settings if engine is None else dataclasses.replace(old.settings, engine=engine)
    shard = old.parts[0].shard if len(old.parts) == 1 else Shard()
    return run_bench(settings, shard, progress, expected_prompts=old.prompts_digest)


def ratios(old: BenchResult, new: BenchResult) -> Table:
    """New figures over old ones, for every case both have: above 1 is faster, or more tokens per round."""
    before = {(r.source, r.temperature, r.case): r for r in summarize(old)}
    body = []
    for row in summarize(new):
        past = before.get((row.source, row.temperature, row.case))
        if past is not None:
            body.append([row.source, f"{row.temperature:g}", row.case.label, *_compare(past, row)])
    return ["prompts", "T", "case", "tokens/s", "speedup", "τ", "ms/round"], body


def _compare(old: Row, new: Row) -> list[str]:
    pairs = [(old.tokens_per_s, new.tokens_per_s), (old.speedup, new.speedup), (old.tau, new.tau)]
    cells = [f"{b.value / a.value:.2f}×" if a and b else "–" for a, b in pairs]
    rounds = f"{new.round_ms.value / old.round_ms.value:.2f}×" if old.round_ms and new.round_ms else "–"
    return [*cells, rounds]


def differences(old: BenchResult, new: BenchResult) -> list[str]:
    """Differences of engine, machine and software, which may explain a ratio that is not 1."""
    a, b = old.parts[0].environment, new.parts[0].environment
    changed = [
        ("engine", old.engine.digest[:12], new.engine.digest[:12]),
        ("machine", a.machine, b.machine),
        ("ddtree-trt", a.product_version, b.product_version),
        ("python", a.python, b.python),
        *(
            (name, a.packages.get(name, "none"), b.packages.get(name, "none"))
            for name in sorted(a.packages | b.packages)
        ),
    ]
    return [f"{name}: was {was}, is {now}" for name, was, now in changed if was != now]
