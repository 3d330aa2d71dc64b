"""Time the host's work of rounds of N slots, over an engine of ready arrays.

    python -m workbench host

Python calls and microseconds a slot: on the engine's thread, and where a part of a stream is taken.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import ddtree_trt
from ddtree_trt import _native
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.runtime.candidates import Marginals
from ddtree_trt.runtime.core import EngineCore
from ddtree_trt.runtime.decoding.budget.costs import Costs
from ddtree_trt.runtime.decoding.budget.policy import AutoBudgets
from ddtree_trt.runtime.engines.base import (
    Draft,
    DraftRequest,
    FinishedRound,
    RoundRequest,
    RoundResult,
    Verdict,
    VerifyRequest,
)
from ddtree_trt.runtime.engines.profile import PassTimes, Profile
from ddtree_trt.runtime.options import EngineOptions
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.text.codec import TextCodec
from ddtree_trt.runtime.tree import best_tree
from workbench.options import bare_manifest

POSITIONS = 15
SLOTS = (1, 4, 16, 64)
ROUNDS, ACCEPTED, NODES = 64, 4, 16  # of a measurement; draft tokens that a round accepts; in a tree of fixed size
CASES: dict[str, dict[str, Any]] = {
    "ar": {"method": "ar"},
    f"{NODES} nodes": {"tree_budget": NODES},
    "auto": {},
}
TOKENIZER = Path(ddtree_trt.__file__).parent / "assets" / "tiny" / "tokenizer"


def draft(width: int) -> tuple[np.ndarray, np.ndarray]:
    """log_probs [L, K] and token_ids [L, K] of a drafter that grows less certain along the block."""
    rng = np.random.default_rng(0)
    sharpness = np.linspace(4.0, 1.5, POSITIONS)[:, None]
    logits = -np.sort(-rng.normal(size=(POSITIONS, width)) * sharpness, axis=1)
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    token_ids = np.argsort(rng.random((POSITIONS, width)), axis=1)
    return np.ascontiguousarray(log_probs, np.float32), token_ids.astype(np.int32)


class ReadyEngine:
    """The `Engine` protocol without networks: every draft and verdict is an array made before."""

    threads, buckets, mixes, inexact = 1, None, True, None

    def __init__(self, slots: int, vocab_size: int) -> None:
        shape = (vocab_size, 8, 1, 1, 1, 8, 8, 1e-6, 1e4, 8192)
        block = DFlashDims(*shape, block_size=POSITIONS + 1, mask_token_id=0, tap_layers=(0,), num_target_layers=1)
        self.manifest = bare_manifest("ready", TransformerDims(*shape), block, Limits(8192, max_batch=slots))
        log_probs, token_ids = draft(NODES)
        token_ids += 100
        self.ready = Draft(Marginals(log_probs, token_ids))
        # By depth: what the drafter thinks most probable there, and from `ACCEPTED` on what it does not think of.
        self.choices = np.append(token_ids[:ACCEPTED, 0], [99] * (POSITIONS + 1 - ACCEPTED)).astype(np.int64)
        self._logits = np.zeros((1, vocab_size), np.float32)
        self._lengths = [0] * slots
        self.rounds = ReadyRounds(self)

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def draftable(self, slot: int, length: int) -> int:
        return length

    def unseen(self, slot: int) -> int:
        return 0

    def restorable(self, slot: int, length: int) -> int:
        return length

    def truncate(self, slot: int, length: int) -> None:
        self._lengths[slot] = length

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self.ready] * len(requests)

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        return [Verdict(self.choices[r.tree.depths], self._logits) for r in requests]

    def commit(self, slot: int, path: np.ndarray, *, taps: bool) -> None:
        self._lengths[slot] += len(path)

    def close(self) -> None:
        """Nothing is held."""


class ReadyRounds:
    """The `DeviceRounds` protocol likewise: of each budget always the same round."""

    by_default = True

    def __init__(self, engine: ReadyEngine) -> None:
        self._engine = engine
        self._launched: deque[Sequence[RoundRequest]] = deque()
        self._made: dict[tuple[int, bool], tuple[list[int], int, Any]] = {}

    @property
    def ahead(self) -> int:
        return len(self._launched)

    def launchable(self, slots: Sequence[int]) -> list[int]:
        return [len(self._launched)] * len(slots)

    def launch(self, requests: Sequence[RoundRequest]) -> None:
        self._launched.append(requests)

    def read(self) -> FinishedRound:
        results = []
        for request in self._launched.popleft():
            if (key := (request.budget, request.looks)) not in self._made:
                more = best_tree(self._engine.ready.candidates, 2 * request.budget)
                tree = more.cut(request.budget)
                choices = self._engine.choices[np.append(0, tree.depths)]
                path = _native.walk(tree.parents, tree.token_ids, choices)
                drafted = (tree, more, path) if request.looks and request.budget else None
                self._made[key] = choices[path].tolist(), len(tree), drafted
            results.append(RoundResult(request, *self._made[key]))
            self._engine.commit(request.slot, np.array(results[-1].tokens), taps=True)
        return FinishedRound(results, 0.002, 0.007)

    def leave(self, slot: int) -> None:
        """Nothing is known of slots."""


class ReadyCosts(Costs):
    """Costs of a machine on which drafts of this engine pay, whatever its rounds take."""

    def learn(self, *round_: Any) -> None:
        """Nothing: what rounds take here is the host's work."""


def running(slots: int, params: dict[str, Any], *, device: bool = False) -> tuple[EngineCore, list[Any]]:
    """A core whose slots are all decoding, by stages or on a `device`, and its requests."""
    codec = TextCodec(TOKENIZER, {})
    engine: Any = ReadyEngine(slots, len(codec.tokenizer))
    engine.manifest = replace(engine.manifest, backend="torch")
    options = EngineOptions(device_rounds="on" if device else "off")
    times = PassTimes(1, 64, 0.002, ((1, 0.006), (17, 0.007), (257, 0.012)))
    nodes = engine.manifest.limits.max_tree_budget
    core = EngineCore(engine, codec, AutoBudgets(ReadyCosts(Profile("", times), nodes), nodes, POSITIONS), options)
    wanted = SamplingParams(max_tokens=8000, ignore_eos=True, **params)
    requests = [core.maker.make([5], wanted) for _ in range(slots)]
    for request in requests:
        core.add(request)
    while len(core.scheduler.running) < slots:
        core.scheduler.step()
    for _ in range(ROUNDS):  # automatic budgets have learnt what drafts bring, and decide alike from here on
        core.scheduler.step()
    return core, requests


def python_calls(slots: int, params: dict[str, Any], *, device: bool = False) -> float:
    """Calls of Python functions that the host makes for a slot in a round; what the engine does in its own is not
    counted."""
    core, _ = running(slots, params, device=device)
    count = 0

    def seen(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_back is not None and frame.f_back.f_code.co_filename != __file__

    sys.setprofile(seen)
    try:
        for _ in range(ROUNDS):
            core.scheduler.step()
    finally:
        sys.setprofile(None)
    return count / slots / ROUNDS


def round_us(slots: int, params: dict[str, Any], *, device: bool = False) -> tuple[float, float]:
    """Median microseconds a slot of a round, and of taking a part of a stream."""
    core, requests = running(slots, params, device=device)
    stepped, taken = [], []
    for _ in range(ROUNDS):
        begin = time.perf_counter_ns()
        core.scheduler.step()
        stepped.append(time.perf_counter_ns() - begin)
        begin = time.perf_counter_ns()
        for request in requests:
            request.take()
        taken.append(time.perf_counter_ns() - begin)
    return float(np.median(stepped)) / 1e3 / slots, float(np.median(taken)) / 1e3 / slots


def main() -> None:
    heads = "".join(f"{f'{name}: calls':>18}{'µs':>8}{'part µs':>10}" for name in CASES)
    for device in (False, True):
        print(f"\nRounds {'on a device' if device else 'by stages'}, a slot\n{'N':>10}{heads}")
        for slots in SLOTS:
            each = CASES.values()
            cells = [(python_calls(slots, p, device=device), *round_us(slots, p, device=device)) for p in each]
            print(f"{slots:>10}" + "".join(f"{calls:>18.1f}{us:>8.1f}{part:>10.1f}" for calls, us, part in cells))
