"""Decoding rounds on the PyTorch engine and their times, for `bench.py`."""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ddtree_trt import _native
from ddtree_trt.runtime.core import EngineCore
from ddtree_trt.runtime.decoding.budget.costs import Costs
from ddtree_trt.runtime.decoding.budget.policy import AutoBudgets
from ddtree_trt.runtime.engines.base import AHEAD, DraftRequest, Engine, FinishedRound, RoundRequest, VerifyRequest
from ddtree_trt.runtime.engines.profile import measure
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.options import EngineOptions
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.stats import ROUND_STAGES, StageClock
from ddtree_trt.runtime.text.codec import TextCodec
from ddtree_trt.runtime.tree import EMPTY, compile_tree
from workbench.host import TOKENIZER


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fill(engine: Engine, tokens: np.ndarray, slot: int = 0) -> int:
    """Empty the slot and prefill these tokens; returns the target's next token."""
    chunk = engine.manifest.limits.prefill_chunk
    engine.truncate(slot, 0)
    for start in range(0, len(tokens), chunk):
        verdict = engine.prefill(slot, tokens[start : start + chunk], rows="last", taps=True)
    return int(verdict.choices[-1])


class HostRounds:
    """Greedy rounds by the engine's methods with the tree built on the host: `loop.decode_round` for one slot, without
    the bookkeeping of requests."""

    def __init__(self, engine: Engine, *, budget: int, dflash: bool = False, profile: bool = False):
        """`profile`: whether stages wait for the device, to be timed one by one."""
        self.engine, self.budget, self.dflash = engine, budget, dflash
        self.clock = StageClock(engine.synchronize if profile else None)

    def round(self, bonus: int) -> list[int]:
        """The tokens of one round."""
        engine, tree = self.engine, EMPTY
        if self.budget:
            with self.clock("draft"):
                top_k = 1 if self.dflash else self.budget
                (draft,) = engine.draft([DraftRequest(0, bonus, top_k, self.budget)])
            with self.clock("tree_build"):
                tree = draft.candidates.best_first(self.budget, width=1 if self.dflash else None)
        with self.clock("tree_compile"):
            request = VerifyRequest(0, compile_tree(bonus, tree))
        with self.clock("verify"):
            (verdict,) = engine.verify([request])
            path = _native.walk(tree.parents, tree.token_ids, verdict.choices)
        with self.clock("commit"):
            engine.commit(0, path, taps=self.budget > 0)
        return verdict.choices[path].tolist()

    def decode(self, bonus: int, tokens: int) -> list[int]:
        """At least so many tokens, the bonus token first."""
        output = [bonus]
        while len(output) < tokens:
            output += self.round(output[-1])
        return output


def spread(times_s: list[float]) -> dict[str, float]:
    """Median and the tenth and ninetieth percentile, in milliseconds."""
    ordered = sorted(1e3 * t for t in times_s)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {"median": statistics.median(ordered), "low": at(0.1), "high": at(0.9)}


def events_ms(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Milliseconds per call of `work`, put on the stream `repeats` times, by the device's clock; on a CPU by ours."""
    synchronize(device)
    if device.type != "cuda":
        start_s = time.perf_counter()
        for _ in range(repeats):
            work()
        return 1e3 * (time.perf_counter() - start_s) / repeats
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def time_host(engine: TorchEngine, bonus: int, *, budget: int, rounds: int, dflash: bool = False) -> dict[str, Any]:
    """Round times with the tree built on the host: whole rounds, and stages with a wait after each."""
    past = engine.length(0)

    def measure(*, profile: bool) -> tuple[list[float], dict[str, float], list[int]]:
        runner = HostRounds(engine, budget=budget, dflash=dflash, profile=profile)
        times, lengths, last = [], [], bonus
        for i in range(rounds + 3):
            if i == 3:  # by now every graph is captured
                runner.clock.take()
                synchronize(engine.device)
            start_s = time.perf_counter()
            tokens = runner.round(last)
            times.append(time.perf_counter() - start_s)
            lengths.append(len(tokens))
            last = tokens[-1]
        synchronize(engine.device)
        stages = {stage: 1e3 * runner.clock.seconds[stage] / rounds for stage in ROUND_STAGES}
        engine.truncate(0, past)
        return times[3:], stages, lengths[3:]

    times, _, lengths = measure(profile=False)
    tokens_per_round, (_, stage_ms, _) = statistics.mean(lengths), measure(profile=True)
    return {"budget": budget, "round_ms": spread(times), "tokens_per_round": tokens_per_round, "stage_ms": stage_ms}


def time_device(engine: TorchEngine, bonus: int, *, budget: int, rounds: int) -> dict[str, Any]:
    """Round times on the device, launched ahead: drafts and the rest by its own clock, the whole loop by the host's."""
    past, rounds_of = engine.length(0), engine.rounds
    assert rounds_of is not None, "a block drafter has rounds on the device"
    request = RoundRequest(0, bonus, budget)
    while rounds_of.ahead:
        rounds_of.read()
    parts: list[tuple[float, float]] = []
    seen: list[float] = []
    lengths: list[int] = []
    while len(seen) <= rounds + 3:
        while rounds_of.ahead < AHEAD:
            rounds_of.launch([request])
        results, draft_s, rest_s = rounds_of.read()
        seen.append(time.perf_counter())
        parts.append((1e3 * draft_s, 1e3 * rest_s))
        lengths.append(len(results[0].tokens))
    engine.truncate(0, past)
    draft_ms, rest_ms = (statistics.median(times) for times in zip(*parts[3:], strict=True))
    visible_ms = 1e3 * (seen[-1] - seen[3]) / (len(seen) - 4)
    return {
        "budget": budget,
        "round_ms": draft_ms + rest_ms,
        "stage_ms": {"draft": draft_ms, "rest": rest_ms},
        "visible_round_ms": visible_ms,
        "gap_us": 1e3 * (visible_ms - draft_ms - rest_ms),
        "tokens_per_round": statistics.mean(lengths[3:]),
    }


def time_batches(engine: TorchEngine, past: int, rounds: int) -> list[dict[str, float]]:
    """Milliseconds on the device of rounds of N slots behind `past` tokens with trees of T tokens, of all sizes that
    have graphs: drafts (of N slots, 0 where there is none) and the rest."""
    vocab, rounds_of = engine.manifest.target_dims.vocab_size, engine.rounds
    assert rounds_of is not None, "a block drafter has rounds on the device"
    rng, slots = np.random.default_rng(0), engine.limits.max_batch
    bonus = [fill(engine, rng.integers(0, vocab - 1, past), slot) for slot in range(slots)]
    found = []
    for n, tokens in rounds_of.shapes.verifications():
        parts = []
        for _ in range(rounds + 2):
            rounds_of.launch([RoundRequest(slot, bonus[slot], tokens - 1) for slot in range(n)])
            parts.append(rounds_of.read()[1:])
        draft_ms, rest_ms = (1e3 * statistics.median(times) for times in zip(*parts[2:], strict=True))
        found.append({"slots": n, "tokens": tokens, "draft_ms": draft_ms, "rest_ms": rest_ms})
        for slot in range(n):
            engine.truncate(slot, past)
    return found


def time_steps(engine: TorchEngine, slots: int, steps: int, **params: Any) -> dict[str, float]:
    """Milliseconds of a scheduler's step over so many requests, and of the graphs in it."""
    rounds_of, graphs_ms, seen = engine.rounds, list[float](), list[float]()
    assert rounds_of is not None, "a block drafter has rounds on the device"
    codec, profile = TextCodec(TOKENIZER, {}), measure(engine)
    nodes, kind = engine.limits.max_tree_budget, engine.manifest.drafting
    costs = Costs(profile, nodes, engine.buckets)
    core = EngineCore(engine, codec, AutoBudgets(costs, nodes, kind.longest_draft), EngineOptions(device_rounds="on"))
    read = rounds_of.read

    def record() -> FinishedRound:
        done = read()
        graphs_ms.append(1e3 * (done.draft_s + done.rest_s))
        return done

    rounds_of.read = record  # type: ignore[method-assign]
    wanted = SamplingParams(max_tokens=engine.limits.max_seq_len - 16, ignore_eos=True, **params)
    requests = [core.maker.make([*range(5, 5 + 8)], wanted) for _ in range(slots)]
    try:
        for request in requests:
            core.add(request)
        while len(core.scheduler.running) < slots:
            core.scheduler.step()
        for _ in range(steps + 3):
            core.scheduler.step()
            seen.append(time.perf_counter())
        del graphs_ms[:-steps]
    finally:
        del rounds_of.read
        for request in requests:
            core.cancel(request)
    return {
        "slots": slots,
        "step_ms": 1e3 * statistics.median(after - before for before, after in pairwise(seen[2:])),
        "graphs_ms": statistics.median(graphs_ms),
    }


def ceilings(device: torch.device) -> dict[str, float]:
    """The device's limits: bytes read plus written per second of a large copy, and a bf16 matrix product's rate."""
    on_gpu = device.type == "cuda"
    size, n = (4 << 30, 8192) if on_gpu else (16 << 20, 256)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy = source.clone()
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    torch.mm(a, b)
    copy_ms = min(events_ms(lambda: copy.copy_(source), device, 5) for _ in range(3))
    product_ms = min(events_ms(lambda: torch.mm(a, b), device, 10) for _ in range(3))
    return {"copy_gb_per_s": 2 * size / copy_ms / 1e6, "bf16_tflop_per_s": 2 * n**3 / product_ms / 1e9}
