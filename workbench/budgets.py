"""Compare automatic budgets with the chain, fixed ones and `ar` in an engine, on its own passes and prompts.

    python -m workbench budgets ENGINE [--prompts FILE.jsonl] [--slots 1,4,8] [--count 15] [--tokens 128]

Every repeat runs each case once on the same prompts, the cases in random order; medians over the repeats are shown, as
tokens a second over those of `ar` in the same repeat. `ar`, `auto` and the best of the others then meet again, three
times as often: the best of many noisy figures is a lucky one, so the last two columns are of these repeats alone. So
many requests are side by side as `--slots` says; times are of whole requests, prompts included. Answers have `--tokens`
at most, later ones down to half as many: of equal ones those of `ar` alone would end together, and the prompts behind
them be read in one pass. A first repeat is not counted. All cases must give the same tokens.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from ddtree_trt.bench.measure import BenchPrompt, load_prompts
from ddtree_trt.device.cpu import busy_warning, usable_cores
from ddtree_trt.runtime.core import EngineCore, open_core
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.request_maker import Request
from workbench.options import PROMPTS, Prompts, integers, print_row

BUDGETS = (1, 2, 4, 8, 12, 16, 24, 32, 64)


def params(case: str, tokens: int) -> SamplingParams:
    chosen: dict[str, dict[str, Any]] = {"ar": {"method": "ar"}, "chain": {"method": "dflash"}, "auto": {}}
    return SamplingParams(max_tokens=tokens, **(chosen[case] if case in chosen else {"tree_budget": int(case)}))


def run(core: EngineCore, requests: Sequence[Request], slots: int) -> list[list[float]]:
    """Seconds after the start at which each token of each request came, `slots` of them side by side."""
    waiting, running = list(enumerate(requests)), list[tuple[int, Request]]()
    arrivals = [list[float]() for _ in requests]
    start = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
            core.add(running[-1][1])
        core.scheduler.step()
        now = time.perf_counter() - start
        for number, request in running:
            arrivals[number] += [now] * (len(request.sequences[0].output) - len(arrivals[number]))
        running = [(number, request) for number, request in running if not request.finished]
    for request in requests:
        request.raise_error()
    return arrivals


def compare(
    core: EngineCore, prompts: Sequence[BenchPrompt], slots: int, tokens: int, repeats: int
) -> dict[str, float]:
    """Tokens a second of each case over those of `ar`, then those of `auto` over `ar`'s and over the best's again."""
    expected: list[list[int]] = []
    limits = [tokens - n * tokens // (2 * len(prompts)) for n in range(len(prompts))]

    def seconds(cases: Sequence[str]) -> dict[str, float]:
        taken = {}
        for case in random.sample(cases, len(cases)):
            core.scheduler.reset_prefix_cache()
            requests = [core.maker.make(p.opening, params(case, n)) for p, n in zip(prompts, limits, strict=True)]
            taken[case] = max(times[-1] for times in run(core, requests, slots))
            answers = [request.sequences[0].output for request in requests]
            expected[:] = expected or answers
            if answers != expected:
                print(f"{case} gave other tokens than the first case (the engine is not exact)")
        return taken

    largest = core.engine.manifest.limits.max_tree_budget
    cases = ["ar", "chain", *(str(n) for n in BUDGETS if n <= largest), "auto"]
    _, *first = [seconds(cases) for _ in range(1 + repeats)]
    ratios = {case: median(each["ar"] / each[case] for each in first) for case in cases}
    best = max(cases[:-1], key=ratios.__getitem__)
    again = [seconds(sorted({"ar", best, "auto"})) for _ in range(3 * repeats)]
    for name, rival in (("ar", "ar"), ("best", best)):
        ratios[f"auto / {name}"] = median(each[rival] / each["auto"] for each in again)
    return ratios


def main(
    engine: Path, prompts: Prompts = PROMPTS, slots: str = "1", count: int = 15, tokens: int = 128, repeats: int = 3,
    threads: int = 0,
) -> None:  # fmt: skip
    loaded = load_prompts(prompts, count)
    with closing(open_core(engine, threads=threads, device_rounds="off")) as core:
        if warning := busy_warning(os.getloadavg()[0], usable_cores()):
            print(warning)
        for place, side_by_side in enumerate(integers(slots)):
            found = compare(core, loaded, side_by_side, tokens, repeats)
            if not place:
                print_row(["engine", "prompts", "slots", *found], head=True)
            print_row([engine.name, loaded[0].source, side_by_side, *(f"{ratio:.2f}" for ratio in found.values())])
