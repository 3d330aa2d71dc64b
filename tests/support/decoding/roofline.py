"""Rounds of many slots on simulated machines: real budgets in simulated time, no clock is read.

A GPU's pass takes as long as reading its bytes or multiplying its rows, whichever is longer: about constant until there
are rows enough to be bound by arithmetic, then in proportion to them. The figures are an H200's for a target of 8
billion parameters with a block drafter of 5 layers, about as published; the shares that kernels reach are assumptions.

A processor's pass is bound by arithmetic from the first row on, and a draft of many slots costs several passes. The
figures are those of the packaged pair with PyTorch on one core, as measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from simulated import DEPTH, NODES, Request, Spent, Text, descend

from ddtree_trt.device.buckets import buckets
from ddtree_trt.runtime.decoding.budget.automatic import AutoBudgets
from ddtree_trt.runtime.decoding.budget.base import Budget, FixedBudget
from ddtree_trt.runtime.decoding.budget.crowd import Turn, plan
from ddtree_trt.runtime.decoding.budget.latency import ContextCost, LatencyProfile
from ddtree_trt.runtime.tree import EMPTY, DraftTree

BUCKETS = tuple(buckets(1 + NODES))
CONTEXTS = (64, 256, 1024)
PROMPT = 200  # tokens


class Machine(Protocol):
    """Seconds of passes over all slots, which hold `context` tokens together."""

    @property
    def buckets(self) -> Sequence[int] | None:
        """Tree tokens that passes are padded to."""

    def verify_s(self, slots: int, tokens: int, context: int) -> float:
        """A pass whose widest tree has that many tokens."""

    def draft_s(self, slots: int, context: int) -> float: ...

    def profile(self, most: int) -> LatencyProfile:
        """What `measure` would find for up to `most` slots."""


@dataclass(frozen=True)
class Network:
    """A network's passes."""

    weight_bytes: float
    row_flops: float
    cache_bytes: float  # keys and values of a token


@dataclass(frozen=True)
class Gpu:
    """A GPU that pads trees to buckets."""

    buckets: tuple[int, ...] = BUCKETS
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
        padded = next(size for size in self.buckets if size >= tokens)
        return self._pass_s(self.target, slots * padded, context)

    def draft_s(self, slots: int, context: int) -> float:
        return self._pass_s(self.drafter, slots * self.block, context)

    def profile(self, most: int) -> LatencyProfile:
        return _profile(self, most, [size for size in self.buckets if size in (1, 2, 4, 8, 16, 32, 48, 64, 65)])


@dataclass(frozen=True)
class Processor:
    """A processor that pads no tree."""

    buckets: None = None
    pass_s: float = 2.3e-3
    slot_s: float = 0.2e-3
    rows_s: float = 0.06e-3  # of a slot with more rows than one: another kernel
    row_s: float = 0.085e-3
    draft_pass_s: float = 1.4e-3
    block_s: float = 0.67e-3

    def verify_s(self, slots: int, tokens: int, context: int) -> float:
        return self.pass_s + slots * (self.slot_s + self.rows_s * (tokens > 1) + self.row_s * (tokens - 1))

    def draft_s(self, slots: int, context: int) -> float:
        return self.draft_pass_s + slots * self.block_s

    def profile(self, most: int) -> LatencyProfile:
        return _profile(self, most, (1, 2, 3, 5, 9, 17, 33, 65))


def _profile(machine: Machine, most: int, sizes: Sequence[int]) -> LatencyProfile:
    def cost(slots: int, context: int) -> ContextCost:
        verify_s = tuple(machine.verify_s(slots, size, slots * context) for size in sizes)
        return ContextCost(context, machine.draft_s(slots, slots * context), tuple(sizes), verify_s, slots=slots)

    counts = [n for n in (2, 4, 8, 16, 32, 64, 128) if n <= most]
    contexts, batches = [cost(1, context) for context in CONTEXTS], [cost(n, CONTEXTS[1]) for n in counts]
    return LatencyProfile("fingerprint", "machine", tuple(contexts), tuple(batches))


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


def serve(machine: Machine, requests: Sequence[Request], slots: int, make_budget: Callable[[], Budget]) -> Spent:
    """The requests, always `slots` of them side by side: until there are fewer. `drafts` counts those of all slots."""
    running = [_Slot(request, make_budget()) for request in requests[:slots]]
    waiting = deque(requests[slots:])
    spent = Spent()
    while len(running) == slots:
        spent += _round(machine, running)
        running = [slot for slot in running if slot.made < slot.tokens]
        while waiting and len(running) < slots:
            running.append(_Slot(waiting.popleft(), make_budget()))
    return spent


def _round(machine: Machine, running: Sequence[_Slot]) -> Spent:
    context = sum(PROMPT + slot.made for slot in running)
    budgets = plan([slot.turn for slot in running], one_pass=True)
    ceilings = budgets.ceilings()
    trees = [slot.text.tree(slot.made, n) if n else None for slot, n in zip(running, ceilings, strict=True)]
    for slot, tree, n in zip(running, trees, budgets.choose(trees), strict=True):
        slot.tree = EMPTY if tree is None else tree.cut(n)
    drafts = sum(n > 0 for n in ceilings)
    widest = max(len(slot.tree) for slot in running)
    seconds = machine.verify_s(len(running), 1 + widest, context)
    seconds += machine.draft_s(drafts, context) if drafts else 0.0
    budgets.took(seconds, widest)
    tokens = sum(slot.advance(n > 0) for slot, n in zip(running, ceilings, strict=True))
    return Spent(seconds, tokens, 1, drafts, sum(len(slot.tree) for slot in running))


def automatic(machine: Machine, slots: int) -> Callable[[], Budget]:
    """Makes the budgets of an engine's requests."""
    return AutoBudgets(machine.profile(slots), NODES, DEPTH, buckets=machine.buckets).for_sequence


def fixed(nodes: int) -> Callable[[], Budget]:
    """The same for a fixed budget; 0 is autoregressive decoding."""
    return lambda: FixedBudget(nodes)
