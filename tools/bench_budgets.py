"""Compare automatic budgets with fixed ones on the torch engine at several numbers of concurrent requests.

    python tools/bench_budgets.py [--engine DIR] [--concurrency 1,4,16,64] [--budgets 2,4,8,16] [--repeats 3]

Without an engine the packaged pair is built for the torch backend, with as many slots as requests run side by side.
Rounds are timed, prompts are not, and the clock stops when less than three quarters of the requests are under way.
Cases are interleaved and rotated: each repeat runs every case once on the same prompts, and medians are shown. On a
machine with other work, `--cpu-clock` counts the processor time of this process, also for the costs of the profile.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from unittest import mock

import ddtree_trt
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.runtime import scheduler as scheduling
from ddtree_trt.runtime.core import EngineCore, open_core
from ddtree_trt.runtime.decoding.loop import decode_round
from ddtree_trt.runtime.engines.base import Engine
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.request_maker import Request
from ddtree_trt.runtime.sequence import Sequence as Completion
from ddtree_trt.runtime.stats import StageClock

PROMPTS = Path(ddtree_trt.__file__).parent / "assets" / "tiny" / "prompts.jsonl"
LARGEST = 32  # nodes of a tree, of the engine that is built here


def build(directory: Path, slots: int) -> Path:
    """The packaged pair for the torch backend."""
    limits = {"max_seq_len": 512, "max_tree_budget": LARGEST, "max_batch": slots}
    compile_engine(BuildRequest(target="tiny", backend="torch", precision="fp32", output=directory, **limits))
    return directory


def decoded(core: EngineCore, slots: int, requests: Sequence[Request]) -> tuple[float, int]:
    """(seconds of decoding, tokens) of `slots` requests side by side, from the end of their prompts on and as long as
    three quarters of them are under way."""
    scheduler, spent, made = core.scheduler, 0.0, 0

    def timed(engine: Engine, running: list[Completion], clock: StageClock) -> None:
        nonlocal spent, made
        if scheduler.waiting or scheduler.prefilling:
            return
        before = sum(len(s.output) for s in running)
        start = time.perf_counter()
        decode_round(engine, running, clock)
        spent += time.perf_counter() - start
        made += sum(len(s.output) for s in running) - before

    with mock.patch.object(scheduling, "decode_round", timed):
        for request in requests:
            core.add(request)
        scheduler.step()
        while scheduler.prefilling or scheduler.waiting or 4 * len(scheduler.running) >= 3 * slots:
            scheduler.step()
        for request in requests:
            core.cancel(request)
    return spent, made


def measure(core: EngineCore, slots: int, budgets: Sequence[str], repeats: int, tokens: int) -> dict[str, list[float]]:
    """Tokens a second of every case, one for each repeat."""
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    waves = max(1, 8 // slots)
    chats = cycle([{"role": "user", "content": p}] for p in prompts[::7])
    found: dict[str, list[float]] = {name: [] for name in budgets}
    for repeat in range(-1, repeats):  # the first is not counted
        asked = [list(islice(chats, slots)) for _ in range(waves)]
        for name in (*budgets[repeat % len(budgets) :], *budgets[: repeat % len(budgets)]):
            params = SamplingParams(
                method="ar" if name == "ar" else "ddtree",
                tree_budget="auto" if name in ("ar", "auto") else int(name),
                max_tokens=tokens,
            )
            parts = []
            for wave in asked:
                core.scheduler.reset_prefix_cache()
                parts.append(decoded(core, slots, [core.maker.make(chat, params) for chat in wave]))
            if repeat >= 0:
                found[name].append(sum(made for _, made in parts) / sum(spent for spent, _ in parts))
    return found


def report(slots: int, found: dict[str, list[float]]) -> str:
    speeds = {name: median(each) for name, each in found.items()}
    fixed = {name: speed for name, speed in speeds.items() if name != "auto"}
    best = max(fixed, key=lambda name: fixed[name])
    paired = {name: median(a / b for a, b in zip(found["auto"], found[name], strict=True)) for name in (best, "ar")}
    figures = "".join(f" {speeds[name]:.0f} |" for name in found)
    return f"| {slots} |{figures} {best} | {paired[best]:.2f} | {paired['ar']:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, help="an engine directory of the torch backend")
    parser.add_argument("--concurrency", default="1,4,16,64")
    parser.add_argument("--budgets", default="2,4,8,16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160, help="most tokens of a request")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cpu-clock", action="store_true", help="count processor time; for one thread")
    args = parser.parse_args()
    if args.cpu_clock:
        time.perf_counter = time.process_time
    counts = [int(n) for n in args.concurrency.split(",")]
    names = ["ar", *args.budgets.split(","), "auto"]
    with tempfile.TemporaryDirectory() as folder:
        directory = args.engine or build(Path(folder) / "tiny", max(counts))
        core = open_core(directory, threads=args.threads, device_rounds="off")
        try:
            load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
            print(f"{core.engine.threads} threads, {load:.1f} runnable processes per core; tokens a second")
            print(f"| requests | {' | '.join(names)} | best fixed | auto over it | auto over ar |")
            print("| ---: |" + " ---: |" * (len(names) + 3))
            for slots in counts:
                print(report(slots, measure(core, slots, names, args.repeats, args.tokens)), flush=True)
        finally:
            core.engine.close()


if __name__ == "__main__":
    main()
