"""Time the loop and the scheduler in a round, over an engine that takes no time.

    python -m workbench loop [--rounds N]

The drafter's answer is fixed, and the target agrees with three of its tokens: four tokens per slot and round, decoded
by the packaged tokenizer. Time inside the engine's methods is subtracted; the rest is compared with the project's
limits: 200 µs for the round of one slot at 32 draft nodes, and for what the scheduler adds to the rounds
100 µs + 20 µs per slot. The whole step is shown too: it draws, walks and detokenises for every slot.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np

import ddtree_trt
from ddtree_trt.artifact.manifest import Limits, Manifest
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.runtime import scheduler as scheduling
from ddtree_trt.runtime.candidates import Marginals
from ddtree_trt.runtime.core import EngineCore
from ddtree_trt.runtime.decoding.budget.costs import Costs
from ddtree_trt.runtime.decoding.budget.policy import AutoBudgets
from ddtree_trt.runtime.decoding.loop import decode_round
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, LogitRows, Verdict, VerifyRequest
from ddtree_trt.runtime.engines.profile import PassTimes, Profile
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.stats import StageClock
from ddtree_trt.runtime.text.codec import TextCodec
from workbench.manifests import bare_manifest

TOKENIZER = Path(ddtree_trt.__file__).parent / "assets" / "tiny" / "tokenizer"
NODES = 32  # B
LENGTH = 15  # L
VOCAB = 2048  # V
ACCEPTED = 3
ROUND_LIMIT_US = 200
STEP_LIMIT_US = 100
SLOT_LIMIT_US = 20


class IdleEngine:
    """An engine that answers at once. `spent_s` is the time its methods took nevertheless."""

    threads = 1
    buckets = None
    rounds = None
    exact = False

    def __init__(self, slots: int) -> None:
        self.manifest = manifest(slots)
        self.spent_s = 0.0
        self._lengths = [0] * slots
        rng = np.random.default_rng(0)
        # Probabilities fall along the block, so that the tree is deep and has branches.
        log_probs = -0.1 - 0.05 * np.arange(LENGTH)[:, None] - 0.7 * np.arange(NODES)
        ids = np.stack([rng.permutation(np.arange(100, VOCAB))[:NODES] for _ in range(LENGTH)])
        self._marginals = Marginals(log_probs.astype(np.float32), ids.astype(np.int32))
        self._logits = rng.normal(0, 1, (1 + NODES, VOCAB)).astype(np.float32)
        self._verdict: Verdict | None = None  # a budget's tree is the same every round

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    draftable_length = length

    def truncate(self, slot: int, length: int) -> None:
        self._lengths[slot] = length

    def prefill(self, slot: int, token_ids: Any, *, rows: LogitRows, taps: bool) -> Verdict:
        self._lengths[slot] += len(token_ids)
        return Verdict(np.full(1, 99), self._logits[:1])

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        start = time.perf_counter()
        drafts = [Draft(self._marginals)] * len(requests)
        self.spent_s += time.perf_counter() - start
        return drafts

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        start = time.perf_counter()
        if self._verdict is None or len(self._verdict.choices) != len(requests[0].tree):
            self._verdict = self._agree(requests[0])
        verdicts = [self._verdict] * len(requests)
        self.spent_s += time.perf_counter() - start
        return verdicts

    def _agree(self, request: VerifyRequest) -> Verdict:
        """A verdict that agrees with the drafter's first choice down to depth ACCEPTED, in choices and logits."""
        tree = request.tree
        choices = np.full(len(tree), 99)
        shallow = tree.depths < ACCEPTED
        choices[shallow] = self._marginals.token_ids[tree.depths[shallow], 0]
        logits = self._logits[: len(tree)]
        logits[np.arange(len(tree)), choices] = 30
        return Verdict(choices, logits)

    def commit(self, slot: int, path: Any, *, taps: bool) -> None:
        self._lengths[slot] += len(path)

    def warm_up(self, progress: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass


def manifest(slots: int) -> Manifest:
    shape = (VOCAB, 8, 1, 1, 1, 8, 8, 1e-6, 1e4, 1 << 20)
    drafter = DFlashDims(*shape, block_size=LENGTH + 1, mask_token_id=0, tap_layers=(), num_target_layers=1)
    limits = Limits(max_seq_len=1 << 20, max_batch=slots)
    return bare_manifest("idle", TransformerDims(*shape), drafter, limits)


def budgets() -> AutoBudgets:
    """Automatic budgets that find about half of NODES worth their cost."""
    times = PassTimes(1, 1, draft_s=1.0, verify=((1, 1.0), (NODES // 2, 1.0), (NODES, 4.0)))
    return AutoBudgets(Costs(Profile("idle", times), 4 * NODES), 4 * NODES, LENGTH)


def started(slots: int, codec: TextCodec, **options: Any) -> tuple[IdleEngine, Scheduler]:
    """An engine and a scheduler whose slots are all past their prompt."""
    engine = IdleEngine(slots)
    core = EngineCore(engine, codec, budgets())
    for _ in range(slots):
        params = SamplingParams(**{"max_tokens": 1 << 19, "method": "ddtree", "tree_budget": NODES, **options})
        core.add(core.maker.make([5, 6, 7], params))
    while core.scheduler.prefilling or core.scheduler.waiting:
        core.scheduler.step()
    return engine, core.scheduler


def overhead_us(engine: IdleEngine, work: Callable[[], object], rounds: int) -> float:
    """Median microseconds of `work` outside the engine."""
    times = []
    gc.collect()
    for _ in range(rounds):
        engine.spent_s = 0.0
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start - engine.spent_s)
    return median(times) * 1e6


def step_overheads_us(engine: IdleEngine, scheduler: Scheduler, rounds: int) -> tuple[float, float]:
    """Median microseconds of a step outside the engine, and of its part outside the decode loop."""
    inside: list[float] = []

    def timed(*args: Any) -> None:
        start, spent = time.perf_counter(), engine.spent_s
        decode_round(*args)
        inside.append(time.perf_counter() - start - (engine.spent_s - spent))

    with mock.patch.object(scheduling, "decode_round", timed):
        whole = overhead_us(engine, scheduler.step, rounds)
    return whole, whole - median(inside) * 1e6


def main(rounds: int = 300) -> None:
    codec = TextCodec(TOKENIZER, {})
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "greedy, automatic budget": {"tree_budget": "auto"},
        "greedy, stop string": {"stop": "no such text"},
        "temperature 1": {"temperature": 1.0, "seed": 1},
        "temperature 1, top-p 0.9": {"temperature": 1.0, "top_p": 0.9, "seed": 1},
        "temperature 1, penalties": {"temperature": 1.0, "frequency_penalty": 0.1, "seed": 1},
        "dflash-sample, temperature 1": {"method": "dflash-sample", "temperature": 1.0, "seed": 1},
    }
    print(f"one round of one slot, B = {NODES}, {1 + ACCEPTED} tokens (limit {ROUND_LIMIT_US} µs)")
    for name, options in kinds.items():
        engine, scheduler = started(1, codec, **options)
        clock, running = StageClock(), scheduler.running
        spent = overhead_us(engine, partial(decode_round, engine, running, clock), rounds)
        print(f"  {name:30} {spent:7.0f} µs")
    print("one step, greedy          whole   scheduler's   limit")
    for slots in (1, 2, 4, 8, 16, 32):
        engine, scheduler = started(slots, codec)
        whole, own = step_overheads_us(engine, scheduler, rounds)
        print(f"  {slots:2} slots {whole:18.0f} µs {own:10.0f} µs {STEP_LIMIT_US + SLOT_LIMIT_US * slots:5} µs")
