"""Rounds of many slots on a simulated GPU: real budgets in simulated time, no clock is read.

A pass takes as long as reading its bytes or multiplying its rows, whichever is longer: about constant until there are
rows enough to be bound by arithmetic, then in proportion to them. The figures are an H200's for a target of 8 billion
parameters with a block drafter of 5 layers, about as published; the shares that kernels reach are assumptions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulated import DEPTH, NODES, Request, Spent, Text, descend

from ddtree_trt.device.buckets import buckets
from ddtree_trt.runtime.decoding.budget import AutoBudgets, Budget, FixedBudget
from ddtree_trt.runtime.decoding.crowd import Turn, plan
from ddtree_trt.runtime.decoding.latency import ContextCost, LatencyProfile
from ddtree_trt.runtime.tree import EMPTY, DraftTree

BUCKETS = buckets(1 + NODES)
CONTEXTS = (64, 512, 2048)
PROMPT = 200  # tokens


@dataclass(frozen=True)
class Network:
    """A network's passes."""

    weight_bytes: float
    row_flops: float
    cache_bytes: float  # keys and values of a token


@dataclass(frozen=True)
class Gpu:
    """Seconds of passes."""

    bytes_s: float = 4.8e12 * 0.85
    flops_s: float = 990e12 * 0.65
    launch_s: float = 0.3e-3
    target: Network = Network(16.4e9, 16.4e9, 147e3)
    drafter: Network = Network(3.2e9, 3.2e9, 20e3)
    block: int = DEPTH + 1

    def _pass_s(self, network: Network, rows: int, context: int) -> float:
        """Over all slots: `rows` rows that see `context` tokens of caches."""
        read = network.weight_bytes + network.cache_bytes * context
        return self.launch_s + max(read / self.bytes_s, rows * network.row_flops / self.flops_s)

    def verify_s(self, slots: int, tokens: int, context: int) -> float:
        """A pass whose widest tree has that many tokens, padded to the next bucket."""
        padded = next(size for size in BUCKETS if size >= tokens)
        return self._pass_s(self.target, slots * padded, context)

    def draft_s(self, slots: int, context: int) -> float:
        return self._pass_s(self.drafter, slots * self.block, context)

    def profile(self, most: int) -> LatencyProfile:
        """What `measure` would find for up to `most` slots."""
        counts = [n for n in (2, 4, 8, 16, 32, 64, 128) if n <= most]
        return LatencyProfile(
            "fingerprint",
            "machine",
            tuple(self._cost(1, context) for context in CONTEXTS),
            tuple(self._cost(slots, CONTEXTS[0]) for slots in counts),
        )

    def _cost(self, slots: int, context: int) -> ContextCost:
        sizes = tuple(size for size in BUCKETS if size in (1, 2, 4, 8, 16, 32, 48, 64, 65))
        verify_s = tuple(self.verify_s(slots, size, slots * context) for size in sizes)
        return ContextCost(context, self.draft_s(slots, slots * context), sizes, verify_s, slots=slots)


class _Slot:
    """A request under way."""

    def __init__(self, request: Request, budget: Budget) -> None:
        self.text, self.budget, self.made, self.tokens = Text(request), budget, 0, request.tokens
        self.tree: DraftTree = EMPTY

    @property
    def turn(self) -> Turn:
        return Turn(self.budget, PROMPT + self.made, self.tokens - self.made)

    def advance(self, drafted: bool) -> int:
        """Walk and observe; returns how many tokens the round made."""
        left, following = self.tokens - self.made, self.text.tokens[self.made :]
        path = descend(self.tree, iter(following.tolist()))[:left]
        self.budget.observe(self.tree, path, int(following[len(path) - 1]), ends=len(path) == left)
        self.made += len(path)
        return len(path)


def serve(gpu: Gpu, requests: Sequence[Request], slots: int, make_budget: Callable[[], Budget]) -> Spent:
    """The requests, always `slots` of them side by side: until there are fewer. `drafts` counts those of all slots."""
    running = [_Slot(request, make_budget()) for request in requests[:slots]]
    waiting = deque(requests[slots:])
    spent = Spent()
    while len(running) == slots:
        spent += _round(gpu, running)
        running = [slot for slot in running if slot.made < slot.tokens]
        while waiting and len(running) < slots:
            running.append(_Slot(waiting.popleft(), make_budget()))
    return spent


def _round(gpu: Gpu, running: Sequence[_Slot]) -> Spent:
    context = sum(PROMPT + slot.made for slot in running)
    budgets = plan([slot.turn for slot in running], one_pass=True)
    ceilings = budgets.ceilings()
    trees = [slot.text.tree(slot.made, n) if n else None for slot, n in zip(running, ceilings, strict=True)]
    for slot, tree, n in zip(running, trees, budgets.choose(trees), strict=True):
        slot.tree = EMPTY if tree is None else tree.cut(n)
    drafts = sum(n > 0 for n in ceilings)
    widest = max(len(slot.tree) for slot in running)
    seconds = gpu.verify_s(len(running), 1 + widest, context) + (gpu.draft_s(drafts, context) if drafts else 0.0)
    tokens = sum(slot.advance(n > 0) for slot, n in zip(running, ceilings, strict=True))
    return Spent(seconds, tokens, 1, drafts, sum(len(slot.tree) for slot in running))


def automatic(gpu: Gpu, slots: int) -> Callable[[], Budget]:
    """Makes the budgets of an engine's requests."""
    return AutoBudgets(gpu.profile(slots), NODES, DEPTH, buckets=BUCKETS).for_sequence


def fixed(nodes: int) -> Callable[[], Budget]:
    """The same for a fixed budget; 0 is autoregressive decoding."""
    return lambda: FixedBudget(nodes)
