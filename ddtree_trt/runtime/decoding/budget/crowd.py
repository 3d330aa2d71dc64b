"""Automatic budgets of the slots of a round, chosen together where an engine takes all slots in one pass.

Such a pass is [N, T]: every slot is padded to the widest tree, so that row i of the pass holds node i of each slot's
pop order, and paying for it once pays for all of them. So there is one order over all slots' nodes, that of the rows:
the gain of a row is the sum of its nodes' acceptance probabilities, its cost that of N rows. Calibrated gains need not
fall along a pop order, nor are costs convex where passes are padded to buckets, and a choice step by step could end
before steps that pay. Therefore all beginnings are compared, and the one of most expected tokens per second is taken,
which is what a single sequence does.

Whether a slot drafts is decided before, by what its latest drafts promised: of the slots that want to draft, as many as
make most tokens per second do, the most promising ones. Probes run anyhow, and a request's first draft where it costs
no more than a single sequence may lose by it.

What drafts and their rows cost is paid by the slots that draft: each pays what it adds to the drafter's pass, and of
the rest a part in proportion to the tokens it expects. Then a slot is not charged for rows that only others wanted, and
one whose expectations are not met stops by its own account.

Where an engine takes slots one after the other, each chooses as if it were alone: its time is its own then, and all
requests together take least time when each takes least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ddtree_trt import _native
from ddtree_trt.runtime.decoding.budget.automatic import AutoBudget
from ddtree_trt.runtime.decoding.budget.base import Budget
from ddtree_trt.runtime.decoding.budget.costs import Load
from ddtree_trt.runtime.tree import DraftTree

DOUBT = 1.05  # how much faster a round must be without some drafts, while drafts gain: one not made teaches nothing


class Turn(NamedTuple):
    """One slot's part in a round."""

    budget: Budget
    past: int  # tokens in front of those to draft
    left: int  # most tokens that may still come
    drafts: bool = True  # whether it may use the drafter


def plan(turns: Sequence[Turn], *, one_pass: bool) -> Plan:
    """The plan of a round. `one_pass`: whether the engine takes all slots in one pass, else one after the other."""
    if not one_pass or len(turns) == 1:
        return Plan(turns)
    autos = {i: turn.budget for i, turn in enumerate(turns) if turn.drafts and isinstance(turn.budget, AutoBudget)}
    crowd = {i: budget for i, budget in autos.items() if budget.shared.weighs_load}
    return _Crowd(turns, crowd) if crowd else Plan(turns)


class Plan:
    """Budgets of a round in which every slot chooses for itself."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns

    def ceilings(self) -> list[int]:
        """Most nodes worth drafting for, for each turn; 0 skips the drafter."""
        return [budget.ceiling(past, left) if drafts else 0 for budget, past, left, drafts in self._turns]

    def choose(self, trees: Sequence[DraftTree | None]) -> list[int]:
        """How many nodes of each turn's tree, in pop order, to verify; None is a slot without a draft."""
        return [
            0 if tree is None else turn.budget.choose(tree, turn.past)
            for turn, tree in zip(self._turns, trees, strict=True)
        ]

    def took(self, seconds: float, widest: int) -> None:
        """Learn from the time of the round, whose widest tree had so many nodes."""


class _Crowd(Plan):
    """Budgets of a round in which the slots share one pass."""

    def __init__(self, turns: Sequence[Turn], autos: Mapping[int, AutoBudget]) -> None:
        """`autos`: the budgets that weigh the load, by their turns."""
        super().__init__(turns)
        self._autos = autos
        self._shared = next(iter(autos.values())).shared
        self._shared.savings.promised = 0.0
        self._past = sum(turn.past for turn in turns) // len(turns)
        self._costs = self._shared.costs.round(self._past, len(turns))
        self._drafting = 0

    def ceilings(self) -> list[int]:
        stopped = sum(budget.stopped for budget in self._autos.values())
        willing = sum(turn.drafts for turn in self._turns) - stopped
        load = Load(len(self._turns), max(1, willing))
        nodes = [0] * len(self._turns)
        for i, (budget, past, left, drafts) in enumerate(self._turns):
            if i in self._autos:
                nodes[i] = self._autos[i].ceiling(self._past, left, load)
            elif drafts:
                nodes[i] = budget.ceiling(past, left)
        for i in self._least_promising(nodes):
            nodes[i] = self._autos[i].put_off()
        self._drafting = sum(n > 0 for n in nodes)
        load = Load(len(self._turns), max(1, self._drafting))
        for i in self._by_rows(nodes):
            self._autos[i].join(self._past, self._turns[i].left, load)
        return nodes

    def _by_rows(self, nodes: Sequence[int]) -> list[int]:
        """The turns that draft, and of whose trees the nodes are chosen together."""
        return [i for i, budget in self._autos.items() if nodes[i] and budget.by_rows]

    def _least_promising(self, nodes: Sequence[int]) -> list[int]:
        """The turns that want to draft `nodes` nodes, and with whose drafts the round would make fewer tokens per
        second."""
        free = [i for i in self._by_rows(nodes) if not self._autos[i].must_draft]
        if not free:
            return []
        widths, verify_s, slots = self._shared.costs.widths, self._costs.verify_s, len(self._turns)
        bound = [i for i in self._by_rows(nodes) if i not in free]
        sure = sum((self._autos[i].outlook for i in bound), np.zeros(len(widths)))
        outlooks = np.stack([self._autos[i].outlook for i in free])  # [F, W]
        order = np.argsort(-outlooks, axis=0, kind="stable")
        added = np.zeros((len(free) + 1, len(widths)))
        np.cumsum(np.take_along_axis(outlooks, order, 0), 0, out=added[1:])
        others = sum(n > 0 for n in nodes) - len(free)
        draft_s = self._costs.draft_s[others : others + len(free) + 1, None]
        rates = (slots + sure + added) / (draft_s + verify_s[widths])  # [F + 1, W]: the best so many draft
        if not others:
            rates[0] = self._costs.hope * slots / verify_s[0]
        if self._shared.savings.trend(self._costs.dearness) > 0:
            rates[-1] *= DOUBT
        most, width = divmod(int(rates.argmax()), len(widths))
        return [free[i] for i in order[most:, width]]

    def choose(self, trees: Sequence[DraftTree | None]) -> list[int]:
        together = {i: tree for i, tree in enumerate(trees) if tree is not None and i in self._autos}
        together = {i: tree for i, tree in together.items() if self._autos[i].by_rows}
        nodes = super().choose([None if i in together else tree for i, tree in enumerate(trees)])
        if together:
            paid = max(min(n, len(tree)) for n, tree in zip(nodes, trees, strict=True) if tree is not None)
            for i, n in self._choose_rows(together, paid).items():
                nodes[i] = n
        return nodes

    def took(self, seconds: float, widest: int) -> None:
        if not next(iter(self._autos.values())).by_rows:
            return  # what such drafts take depends on their lengths, which the costs of a round do not hold
        self._shared.costs.learn(self._past, len(self._turns), self._drafting, widest, seconds)

    def _choose_rows(self, trees: Mapping[int, DraftTree], paid: int) -> dict[int, int]:
        """The nodes of each turn's tree, of a round whose other trees have up to `paid` nodes."""
        accepted = {i: self._autos[i].weigh(tree) for i, tree in trees.items()}
        gains = np.zeros(max(map(len, accepted.values())))
        for each in accepted.values():
            gains[: len(each)] += each
        draft_s, verify_s = float(self._costs.draft_s[self._drafting]), self._costs.verify_s
        least = max(paid, *(self._autos[i].least for i in trees))
        rows, _ = _native.best_rows(gains, float(len(self._turns)), draft_s, verify_s, self._shared.costs.filled, least)
        expected = {i: float(each[:rows].sum()) for i, each in accepted.items()}
        own_s = draft_s - float(self._costs.draft_s[self._drafting - 1])  # what one more slot adds to a draft
        common_s = draft_s * len(trees) / self._drafting - own_s * len(trees)
        common_s = max(0.0, common_s) + float(verify_s[rows] - verify_s[paid])
        total = sum(expected.values())
        chosen = {}
        for i, tree in trees.items():
            chosen[i] = min(rows, len(accepted[i]))
            part = expected[i] / total if total else 1 / len(trees)
            self._autos[i].settle(tree, accepted[i], chosen[i], own_s + part * common_s)
        return chosen
