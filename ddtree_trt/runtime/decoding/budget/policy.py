"""The rule of automatic budgets; the package's docstring says what it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt.runtime.decoding.budget.costs import STEP, Costs
from ddtree_trt.runtime.tree import DraftTree, chain

LOSS = 2.0  # single-token passes that a request may lose by drafting since it last gained, ...
LEAST_DRAFTS = 2.0  # ... or so many of the smallest drafts that could pay, ...
PROBE = 0.4  # ... and times the root of its tokens since then. Where no gain is expected, that alone is for probes
CREDIT = 4.0  # most of an earlier gain that is set against later losses
RECENT = 1 / 16  # least weight of the latest draft in what is expected of the next one
REACHED = 0.8  # prior acceptance rate of a depth where the length is chosen before the drafter has probabilities
REST = 16  # tokens after which a request that may not draft, alone in its passes, is weighed again
PRIOR, MEMORY = 4.0, 48.0  # pseudo-observations of a calibration, and rounds after which its evidence counts a third
LOWEST, HIGHEST = 0.02, 2.0  # bounds of its ratios, so that a streak of luck has a bounded effect

Proposes = Literal["block", "tokens", "levels"]  # what a drafter's pass makes: L positions, a token, or a level
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Decision:
    """The budget of a round, and the estimates it was chosen by. Of a pass with other slots seconds are one's share."""

    nodes: int
    expected_tokens: float  # 1 + Σ q̂ over the chosen nodes
    expected_s: float  # C_draft + C_verify
    single_token_s: float  # a round without drafting
    drafted: bool = True
    probe: bool = False  # drafted only to see whether drafting pays again

    @property
    def expected_gain(self) -> float:
        """Expected tokens per second, relative to a round without drafting."""
        return self.expected_tokens * self.single_token_s / self.expected_s


@dataclass
class FixedBudget:
    """The same budget every round."""

    nodes: int
    levels: int | None = None  # of a drafter that drafts level by level; None for as many as nodes


class Calibration:
    """How often walks accept one of the children at each depth d that they come to, over the drafter's mass of them:
    ratios r_d, shrunk towards r_{d−1}. A node is accepted with probability about q̂ = exp(log_weight) · r_1 ⋯ r_d."""

    def __init__(self, max_depth: int, root: float = 1.0) -> None:
        """`root`: the ratio above the first."""
        self._evidence = np.zeros((2, max_depth))  # observed, predicted
        self._root = root

    def ratios(self) -> Floats:
        """r_1 … r_max_depth."""
        return _native.calibrated_ratios(self._evidence, None, PRIOR, LOWEST, HIGHEST, self._root)

    def observe(self, tree: DraftTree, path: NDArray[np.int32]) -> None:
        """Learn from a verified tree and the accepted path [m], root first, at the depths the walk tried."""
        mass = _native.tried_mass(tree.parents, tree.log_weights, path)
        _native.learn(self._evidence, mass, 1 - 1 / MEMORY)


class AutoBudgets:
    """What the automatic budgets of an engine's requests share: the costs of its passes."""

    def __init__(self, costs: Costs, max_nodes: int, max_depth: int, proposes: Proposes = "block") -> None:
        """`max_depth`: most tokens of a path. A drafter by tokens makes chains, of a node in each pass."""
        self.costs, self.max_nodes, self.max_depth, self.proposes = costs, max_nodes, max_depth, proposes
        powers = 2 ** np.arange(max_nodes.bit_length())
        nodes = np.unique([0, *powers, *(powers * 3 // 2)])
        # Sizes [W] compared before a draft: numbers of nodes, or of passes of a drafter that makes several.
        self.sizes = np.arange(1 + max_depth)
        if proposes == "block":
            self.sizes = np.unique(costs.filled[nodes[nodes <= max_nodes]])


class AutoBudget:
    """What one request has lost and gained by drafting, and what it expects of a draft."""

    def __init__(self, shared: AutoBudgets) -> None:
        self.shared = shared
        self.levels: int | None = None  # of the next draft, of a drafter by levels
        self.fresh = True  # whether it has not drafted yet
        self.rest = 0  # tokens until it is weighed again, where it is alone in its passes
        self.single: Decision | None = None  # the one until then
        self._loss = 0.0  # single-token passes
        self._tokens = 0  # since the loss was last a gain
        self._expect_anew()

    def _expect_anew(self) -> None:
        """Expect what a new request does: that all is accepted."""
        self._acceptance = Calibration(self.shared.max_depth)  # of nodes, by their probabilities
        self._reached = Calibration(self.shared.max_depth, REACHED)  # of depths, whatever the probabilities
        self._recent = np.minimum(self.shared.sizes, self.shared.max_depth).astype(float)
        self._weighed = 0

    def may_lose(self, price: float | None = None) -> float:
        """Single-token passes that a round may lose where gain is expected and the smallest draft that could pay costs
        `price`; without a price those of a probe."""
        return PROBE * math.sqrt(self._tokens) - self._loss + (max(LOSS, LEAST_DRAFTS * price) if price else 0.0)

    def expected(self, deepest: int) -> Floats:
        """Tokens [W] that a draft of each of `sizes` is expected to add."""
        if self.shared.proposes == "block":
            return np.minimum(self._recent, deepest)
        ratios = self._reached.ratios()
        ratios[deepest:] = 0.0
        return np.concatenate(([0.0], np.cumsum(np.cumprod(ratios))))

    def weigh(self, tree: DraftTree, deepest: int) -> Floats:
        """Acceptance probabilities [n] of the nodes of a drafted tree."""
        ratios = self._acceptance.ratios()
        ratios[deepest:] = 0.0  # the output ends above these depths
        accepted = _native.acceptances(tree.log_weights, tree.depths, ratios)
        if self.shared.proposes == "block":
            tokens = np.concatenate(([0.0], np.cumsum(accepted)))[np.minimum(self.shared.sizes, len(accepted))]
            self._weighed += 1
            self._recent += max(RECENT, 1 / self._weighed) * (tokens - self._recent)
        return accepted

    def observe(self, decision: Decision, tree: DraftTree, path: NDArray[np.int32], *, ends: bool = False) -> None:
        """Learn from a verified tree and the accepted path [m], root first. `ends`: the output ends with the path, and
        may have cut it: the round is counted, but is no evidence of the draft's quality."""
        self._tokens += len(path)
        self.rest -= len(path)
        if not decision.drafted:
            return
        lost = decision.expected_s / decision.single_token_s - len(path)
        self._loss = max(self._loss + lost, -CREDIT)
        if decision.probe and lost < 0:
            self._loss = min(self._loss, 0.0)
            self._expect_anew()
        if self._loss <= 0:
            self._tokens = 0
        if not ends and len(tree):
            self._acceptance.observe(tree, path)
            if self.shared.proposes != "block":
                self._reached.observe(chain(np.zeros(tree.depths.max())), np.arange(len(path), dtype=np.int32))


Budget = FixedBudget | AutoBudget


class SlotInput(NamedTuple):
    """One slot's part in a round."""

    budget: Budget
    past: int  # tokens in front of those to draft
    left: int  # most tokens that may still come, 1 or more
    drafts: bool = True  # whether it may use the drafter


class RoundPlan:
    """The budgets of a round whose slots share its passes: call `ceilings`, then `choose`, then `took`.

    Every node of the widest tree is a row of the pass for all slots, so that there is one size for those that draft.
    """

    def __init__(self, slots: Sequence[SlotInput], *, ahead: bool = False) -> None:
        """`ahead`: sizes are chosen before the drafts are seen, as for rounds that a device makes."""
        self.decisions: list[Decision | None] = [None] * len(slots)  # None for fixed budgets
        self._drafting: list[int] = []  # slots of automatic budgets
        budget = slots[0].budget
        if len(slots) == 1 and isinstance(budget, AutoBudget) and budget.rest > 0:
            self._nodes, self._autos, self.decisions = [0], {}, [budget.single]
            return
        self._nodes = [s.budget.nodes if s.drafts and isinstance(s.budget, FixedBudget) else 0 for s in slots]
        self._autos = {i: s.budget for i, s in enumerate(slots) if s.drafts and isinstance(s.budget, AutoBudget)}
        self._gaining: set[int] = set()  # those from whose drafts gain is expected; the others probe
        if not self._autos:
            return
        self._shared, self._ahead = next(iter(self._autos.values())).shared, ahead
        self._slots, self._past = len(slots), sum(s.past for s in slots) // len(slots)
        self._deepest = {i: min(slots[i].left - 1, self._shared.max_depth) for i in self._autos}
        self._passes = 1  # of the drafter
        self._mixed = any(self._nodes)  # whether fixed budgets draft, too
        self._verify_s = self._shared.costs.verify_s(self._past, self._slots)
        self._single_s = float(self._verify_s[0]) / self._slots

    def ceilings(self) -> list[int]:
        """Most nodes to draft for each slot; 0 skips the drafter. Sets the levels of drafts by levels."""
        for i in self._autos:
            self.decisions[i] = Decision(0, 1.0, self._single_s, self._single_s, drafted=False)
        able = [i for i, deepest in self._deepest.items() if deepest] if self._autos else []
        if not able or (self._shared.costs.single_due and not self._mixed):
            return list(self._nodes)
        expected = {i: self._autos[i].expected(self._deepest[i]) for i in able}
        price, _ = self._price(len(able))
        self._gaining = self._choose_gaining([i for i in able if 0 < price <= self._autos[i].may_lose(price)], expected)
        if self._gaining:
            added = self._slot_s(len(able)) / self._single_s  # by one more slot: the rows are there anyhow
            self._drafting = [i for i in able if i in self._gaining or added < expected[i].max()]
        while able and not self._gaining:
            price, _ = self._price(len(able))
            self._drafting = [i for i in able if 0 < price <= self._autos[i].may_lose()]
            if self._drafting == able:
                break
            able = self._drafting
        if not self._drafting and self._slots == 1:
            self._autos[0].rest, self._autos[0].single = REST, self.decisions[0]
        if self._drafting:
            self._plan_drafts(expected)
        return list(self._nodes)

    def _choose_gaining(self, slots: list[int], expected: Mapping[int, Floats]) -> set[int]:
        """Those of the slots, the most promising first, with whose drafts the round makes most tokens per second."""
        slots = sorted(slots, key=lambda i: -expected[i][-1]) if len(slots) > 1 else slots
        gains = np.cumsum([expected[i] for i in slots], axis=0) if len(slots) > 1 else [expected[i] for i in slots]
        best, chosen, count = self._slots / self._verify_s[0], 0, len(slots)
        while count:
            rates = (self._slots + gains[count - 1]) / (self._verify_s[0] + self._added_s(count))
            if (rate := rates[1:].max()) > best:
                best, chosen = rate, count
            count //= 2
        return set(slots[:chosen])

    def _price(self, drafting: int) -> tuple[float, int]:
        """What the smallest draft that could pay costs each of so many slots, in single-token passes, and its place in
        `sizes`; zeros where none could."""
        deepest = max(self._deepest.values())
        kept, key = self._shared.costs.kept, ("price", drafting, self._past // STEP, self._slots, self._passes, deepest)
        if key not in kept:
            added = self._added_s(drafting) / drafting / self._single_s
            least = int(np.argmax(np.minimum(self._shared.sizes, deepest) > added))
            kept[key] = float(added[least]), least
        return kept[key]

    def _added_s(self, drafting: int, *, planned: bool = False) -> Floats:
        """Seconds that so many drafts of each of `sizes` add to the round; with `planned`, planned drafts with every
        number of nodes."""
        kept, key = self._shared.costs.kept, (planned, drafting, self._past // STEP, self._slots, self._passes)
        if key not in kept:
            sizes = np.arange(1 + self._shared.max_nodes) if planned else self._shared.sizes
            passes = self._passes if planned or self._shared.proposes == "block" else sizes
            draft_s = passes * self._shared.costs.draft_s(self._past, drafting)
            kept[key] = np.where(sizes > 0, draft_s + self._verify_s[sizes] - self._verify_s[0], 0.0)
        return kept[key]

    def _slot_s(self, drafting: int) -> float:
        """Seconds that one more slot adds to so many drafts."""
        draft_s, half = partial(self._shared.costs.draft_s, self._past), drafting // 2
        return max(0.0, self._passes * (draft_s(drafting) - draft_s(half))) / (drafting - half) if half else 0.0

    def _plan_drafts(self, expected: Mapping[int, Floats]) -> None:
        """Have slots draft for the size of which most is expected, and no less than the smallest that could pay."""
        shared, drafting = self._shared, self._drafting
        self._lowest, least = self._price(len(drafting))
        if not least:  # so few could not pay
            self._drafting = []
            return
        added_s, gains = self._added_s(len(drafting)), sum(expected[i] for i in drafting)
        place = max(int(np.argmax((self._slots + gains) / (self._verify_s[0] + added_s))), least)
        size, self._least = int(shared.sizes[place]), int(shared.sizes[least])
        if shared.proposes != "block":
            self._passes = size
        for i in drafting:
            self._autos[i].levels = size if shared.proposes == "levels" else None
            if shared.proposes == "tokens" or self._ahead:
                self._nodes[i] = min(size, self._deepest[i]) if shared.proposes == "tokens" else size
                self._decide(i, self._nodes[i], float(expected[i][place]), float(added_s[place]) / len(drafting))
            else:
                most = size * 3 // 2 if shared.proposes == "block" else shared.max_nodes
                self._nodes[i] = int(shared.costs.filled[min(most, shared.max_nodes)])

    def choose(self, trees: Sequence[DraftTree | None]) -> list[int]:
        """How many nodes of each slot's tree, in pop order, to verify; None is a slot without a draft."""
        nodes = [0 if tree is None else n for tree, n in zip(trees, self._nodes, strict=True)]
        drafted = [(i, tree) for i in self._drafting if (tree := trees[i]) is not None]
        if not drafted or self._shared.proposes == "tokens":
            return nodes
        count, longest = len(self._drafting), max(len(tree) for _, tree in drafted)
        added_s = self._added_s(count, planned=True)[: 1 + longest]
        weighed, gains = {}, np.zeros(longest)
        for i, tree in drafted:
            budget = self._autos[i]
            afforded_s = budget.may_lose(self._lowest) * self._single_s * count
            most = max(int(np.searchsorted(added_s[1:], afforded_s, side="right")), self._least)
            weighed[i] = budget.weigh(tree, self._deepest[i])[:most]
            gains[: len(weighed[i])] += weighed[i]
        rates = (self._slots + np.cumsum(gains)) / (self._verify_s[0] + added_s[1:])
        size = 1 + int(np.argmax(rates)) if longest else 0
        slot_s, total = self._slot_s(count), float(gains[:size].sum())
        spent_s = float(added_s[size]) if size else self._passes * self._shared.costs.draft_s(self._past, count)
        common_s = max(0.0, spent_s - slot_s * count)
        for i, accepted in weighed.items():
            nodes[i], tokens = min(size, len(accepted)), float(accepted[:size].sum())
            # What all pay for is shared by what each expects: who expects little is not charged for others' rows.
            self._decide(i, nodes[i], tokens, slot_s + common_s * (tokens / total if total else 1 / len(weighed)))
        return nodes

    def _decide(self, slot: int, nodes: int, tokens: float, added_s: float) -> None:
        probe = slot not in self._gaining
        self.decisions[slot] = Decision(nodes, 1 + tokens, self._single_s + added_s, self._single_s, probe=probe)

    def took(self, draft_s: float, rest_s: float, widest: int) -> None:
        """Learn from the round's seconds: of the draft, and of all else, with `widest` nodes in the widest tree."""
        if not self._autos:
            return
        fresh = [i for i in self._drafting if self._autos[i].fresh]  # a request's first draft takes in its prompt
        for i in fresh:
            self._autos[i].fresh = False
        drafting = 0 if fresh or self._mixed else len(self._drafting)
        self._shared.costs.learn(self._past, self._slots, drafting, widest, draft_s / self._passes, rest_s)
