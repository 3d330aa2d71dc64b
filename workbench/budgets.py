"""Compare automatic budgets with the chain, fixed ones and `ar` in an engine, on its own passes and prompts.

    python -m workbench budgets ENGINE [--prompts FILE.jsonl] [--slots 1,4,8] [--count 15] [--tokens 128]

Every repeat runs each case once on the same prompts, the cases interleaved and rotated; medians over the repeats are
shown, as tokens a second over those of `ar` in the same repeat. So many requests are side by side as `--slots` says;
times are of whole requests, prompts included. A first repeat is not counted. All cases must give the same tokens.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ddtree_trt.bench.prompts import BenchPrompt, load_prompts
from ddtree_trt.bench.settings import TINY
from ddtree_trt.device.cpu import busy_warning, usable_cores
from ddtree_trt.runtime.core import EngineCore, open_core
from ddtree_trt.runtime.params import SamplingParams

Prompts = Sequence[BenchPrompt]
BUDGETS = (1, 2, 4, 8, 12, 16, 24, 32, 64)


def params(case: str, tokens: int) -> SamplingParams:
    chosen: dict[str, dict[str, Any]] = {"ar": {"method": "ar"}, "chain": {"method": "dflash"}, "auto": {}}
    return SamplingParams(max_tokens=tokens, **(chosen[case] if case in chosen else {"tree_budget": int(case)}))


def run(core: EngineCore, prompts: Prompts, slots: int, case: str, tokens: int) -> tuple[float, list[list[int]]]:
    """(seconds, tokens of each answer) of all prompts, `slots` of them side by side."""
    core.scheduler.reset_prefix_cache()
    requests = [core.maker.make(prompt.opening, params(case, tokens)) for prompt in prompts]
    waiting, running = list(requests), list(requests[:0])
    start = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
            core.add(running[-1])
        core.scheduler.step()
        running = [request for request in running if not request.finished]
    seconds = time.perf_counter() - start
    for request in requests:
        request.raise_error()
    return seconds, [request.sequences[0].output for request in requests]


def compare(core: EngineCore, prompts: Prompts, slots: int, tokens: int, repeats: int) -> dict[str, float]:
    """Tokens a second of each case over those of `ar`."""
    largest = core.engine.manifest.limits.max_tree_budget
    cases = ["ar", "chain", *(str(n) for n in BUDGETS if n <= largest), "auto"]
    ratios: dict[str, list[float]] = {case: [] for case in cases}
    expected: list[list[int]] = []
    for repeat in range(-1, repeats):
        turn = repeat % len(cases)
        taken = {}
        for case in (*cases[turn:], *cases[:turn]):
            taken[case], answers = run(core, prompts, slots, case, tokens)
            expected = expected or answers
            if answers != expected:
                print(f"{case} gave other tokens than {cases[0]} (the engine is not exact)")
        if repeat >= 0:
            for case in cases:
                ratios[case].append(taken["ar"] / taken[case])
    return {case: median(each) for case, each in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--prompts", default=TINY, help="as in ddtree-trt bench")
    parser.add_argument("--slots", default="1")
    parser.add_argument("--count", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    prompts = load_prompts([args.prompts], args.count)
    core = open_core(args.engine, threads=args.threads, device_rounds="off")
    try:
        if warning := busy_warning(os.getloadavg()[0], usable_cores()):
            print(warning)
        heads: list[str] = []
        for slots in map(int, args.slots.split(",")):
            found = compare(core, prompts, slots, args.tokens, args.repeats)
            if not heads:
                heads = ["engine", "prompts", "slots", *found, "auto / best"]
                print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
            best = max(ratio for case, ratio in found.items() if case != "auto")
            figures = [f"{ratio:.2f}" for ratio in found.values()]
            cells = [args.engine.name, prompts[0].source, str(slots), *figures, f"{found['auto'] / best:.2f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    finally:
        core.close()
