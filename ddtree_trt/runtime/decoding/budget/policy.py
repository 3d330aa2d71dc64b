"""The rule of automatic budgets; the package's docstring says what it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt.drafters.kind import Drafts
from ddtree_trt.runtime.decoding.budget.costs import STEP, Costs
from ddtree_trt.runtime.tree import DraftTree, chain

LOSS = 3.0  # single-token passes that a request may lose by drafting since it last gained, ...
PROBE = 0.3  # ... and times the root of its tokens since then. Where no gain is expected, that alone is for probes
CREDIT = 4.0  # most of an earlier gain that is set against later losses
PATIENCE = 8  # requests in a row that lost by drafting, after which others may lose so much less until one gains
REPAID = 8  # tokens left for each single-token pass that a draft takes longer behind tokens its drafter has not seen
RECENT = 1 / 16  # least weight of the latest draft in what is expected of the next one
REACHED = 0.8  # prior acceptance rate of a depth where the length is chosen before the drafter has probabilities
REST = 8  # rounds after which requests none of which may draft are weighed again: a plan takes time
PRIOR, MEMORY = 4.0, 48.0  # pseudo-observations of a calibration, and rounds after which its evidence counts a third
LOWEST, HIGHEST = 0.02, 2.0  # bounds of its ratios, so that a streak of luck has a bounded effect

Floats = NDArray[np.float64]


class Decision(NamedTuple):
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
        return _native.calibrated_ratios(self._evidence, PRIOR, LOWEST, HIGHEST, self._root)

    def accepted(self, tree: DraftTree, deepest: int) -> Floats:
        """q̂ [n]; 0 below `deepest`."""
        return _native.acceptances(tree.log_weights, tree.depths, self._evidence, PRIOR, LOWEST, HIGHEST, deepest)

    def observe(self, tree: DraftTree, path: NDArray[np.int32]) -> None:
        """Learn from a verified tree and the accepted path [m], root first, at the depths the walk tried."""
        _native.learn(self._evidence, tree.parents, tree.log_weights, path, 1 - 1 / MEMORY)


class AutoBudgets:
    """What the automatic budgets of an engine's requests share: the costs of its passes, and a rest of planning."""

    def __init__(self, costs: Costs, max_nodes: int, max_depth: int, proposes: Drafts = "block") -> None:
        """`max_depth`: most tokens of a path. A drafter by tokens makes chains, of a node in each pass."""
        self.costs, self.max_nodes, self.max_depth, self.proposes = costs, max_nodes, max_depth, proposes
        powers = 2 ** np.arange(max_nodes.bit_length())
        nodes = np.unique([0, *powers, *(powers * 3 // 2)])
        # Sizes [1 + W] compared before a draft, 0 first: numbers of nodes, or of passes where a draft takes several.
        self.sizes = np.arange(1 + max_depth)
        if proposes == "block":
            self.sizes = np.unique(costs.filled[nodes[nodes <= max_nodes]])
        self.resting: list[AutoBudget] = []  # requests whose next `rest` rounds are without drafts, as was decided
        self.rest, self.single = 0, Decision(0, 1.0, 1.0, 1.0, drafted=False)
        self._poor = 0  # requests that have lost since one has gained

    @property
    def share(self) -> float:
        """The part of its allowance that a request has behind its first draft and before it gains."""
        return 1.0 if self._poor < PATIENCE else 1 / PATIENCE

    def judge(self, lost: float) -> None:
        """Learn how many single-token passes a request has lost that drafted."""
        self._poor = self._poor + 1 if lost > 0 else 0


class AutoBudget:
    """What one request has lost and gained by drafting, and what it expects of a draft."""

    def __init__(self, shared: AutoBudgets) -> None:
        self.shared = shared
        self.levels: int | None = None  # of the next draft, of a drafter by levels
        self._loss = 0.0  # single-token passes
        self._lost = 0.0  # the same, of earlier gains nothing forgotten
        self._gained = False
        self._tokens = 0  # since the loss was last a gain
        self._expect_anew()

    def _expect_anew(self) -> None:
        """Expect what a new request does: that all is accepted."""
        self._acceptance = Calibration(self.shared.max_depth)  # of nodes, by their probabilities
        self._reached = Calibration(self.shared.max_depth, REACHED)  # of depths, whatever the probabilities
        self._recent: Floats = np.diff(np.minimum(self.shared.sizes, self.shared.max_depth).astype(float))
        self._weighed = 0

    def may_lose(self, *, probe: bool = False) -> float:
        """Single-token passes that a round may lose."""
        share = 1.0 if self._gained or not self._lost else self.shared.share
        return share * ((0.0 if probe else LOSS) + PROBE * math.sqrt(self._tokens)) - self._loss

    def expected(self, deepest: int) -> Floats:
        """Tokens [W] that each of `sizes` is expected to add to the one below it."""
        if self.shared.proposes == "block":
            if deepest == self.shared.max_depth:
                return self._recent
            return np.diff(np.minimum(np.cumsum(self._recent), deepest), prepend=0.0)
        ratios = self._reached.ratios()
        ratios[deepest:] = 0.0
        return np.cumprod(ratios, dtype=np.float64)

    def weigh(self, tree: DraftTree, deepest: int) -> Floats:
        """Acceptance probabilities [n] of the nodes of a drafted tree; the output ends above those below `deepest`."""
        accepted = self._acceptance.accepted(tree, deepest)
        if self.shared.proposes == "block":
            self._weighed += 1
            _native.follow(self._recent, self.shared.sizes, accepted, max(RECENT, 1 / self._weighed))
        return accepted

    def observe(self, decision: Decision, tree: DraftTree, path: NDArray[np.int32], *, ends: bool = False) -> None:
        """Learn from a verified tree and the accepted path [m], root first. `ends`: the output ends with the path, and
        may have cut it: the round is counted, but is no evidence of the draft's quality."""
        self._tokens += len(path)
        if decision.drafted:
            self._book(decision, tree, path, ends)
        if ends and self._lost:
            self.shared.judge(self._lost)

    def _book(self, decision: Decision, tree: DraftTree, path: NDArray[np.int32], ends: bool) -> None:
        """Learn from a round with a draft."""
        lost = decision.expected_s / decision.single_token_s - len(path)
        self._lost += lost
        self._loss = max(self._loss + lost, -CREDIT)
        if self._lost < 0 and not self._gained:
            self._gained = True
            self.shared.judge(self._lost)
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
    unseen: int = 0  # tokens of the past that the drafter has still to take in


class _Prices(NamedTuple):
    """What drafts for some of the slots of a round take."""

    added_s: Floats  # [W]: what drafts of each of `sizes` add to the round
    nodes_s: Floats  # [max_nodes]: what drafts add of which so many nodes are verified
    least: int  # place in `sizes` of the smallest draft that could pay; 0 where none could
    least_price: float  # what that costs each of the slots, in single-token passes
    slot_s: Floats  # [max_nodes]: what one more slot with so many nodes adds


class RoundPlan:
    """The budgets of a round whose slots share its passes: call `ceilings`, then `choose`, then `took`.

    One size holds for all that draft. Where passes are padded, every node of it is a row for the other slots, too.
    """

    def __init__(self, slots: Sequence[SlotInput], *, ahead: bool = False) -> None:
        """`ahead`: sizes are chosen before the drafts are seen, as for rounds that a device makes."""
        self.decisions: list[Decision | None] = [None] * len(slots)  # None for fixed budgets
        self._drafting: list[int] = []  # slots of automatic budgets
        self._gaining: list[int] = []  # those from whose drafts gain is expected; the others probe
        self._nodes = [s.budget.nodes if s.drafts and isinstance(s.budget, FixedBudget) else 0 for s in slots]
        self._autos = {i: s.budget for i, s in enumerate(slots) if s.drafts and isinstance(s.budget, AutoBudget)}
        if not self._autos:
            return
        requests = list(self._autos.values())
        self._shared = shared = requests[0].shared
        self._ahead = ahead
        if shared.rest and shared.resting == requests:
            shared.rest -= 1
            for i in self._autos:
                self.decisions[i] = shared.single
            self._autos = {}
            return
        shared.resting, shared.rest = requests, 0
        self._slots, self._past = len(slots), sum(s.past for s in slots) // len(slots)
        self._deepest = {i: min(slots[i].left - 1, self._shared.max_depth) for i in self._autos}
        self._passes = 1  # of the drafter
        self._mixed = any(self._nodes)  # whether fixed budgets draft, too
        self._round_s = float(self._shared.costs.verify_s(self._past, self._slots)[0])  # without drafts
        self._single_s = self._round_s / self._slots
        context_s, self._unseen = shared.costs.context_s, [s.unseen for s in slots]
        self._late = {  # those that have too few tokens left to repay what the drafter has still to take in
            i for i in self._autos if context_s * slots[i].unseen * REPAID > slots[i].left * self._single_s
        }

    def ceilings(self) -> list[int]:
        """Most nodes to draft for each slot; 0 skips the drafter. Sets the levels of drafts by levels."""
        if not self._autos:
            return self._nodes
        self._shared.single = Decision(0, 1.0, self._single_s, self._single_s, drafted=False)
        for i in self._autos:
            self.decisions[i] = self._shared.single
        able = [i for i, deepest in self._deepest.items() if deepest and i not in self._late]
        if not able or (self._shared.costs.single_due and not self._mixed):
            return self._nodes
        expected, prices = {i: self._autos[i].expected(self._deepest[i]) for i in able}, self._prices(len(able))
        self._choose_gaining(
            [i for i in able if prices.least and prices.least_price <= self._autos[i].may_lose()], expected
        )
        if self._gaining:
            added = prices.slot_s[int(self._shared.sizes[prices.least]) - 1] / self._single_s
            self._drafting = [i for i in able if i in self._gaining or added < expected[i].sum()]
        while able and not self._gaining:
            prices = self._prices(len(able))
            self._drafting = [
                i for i in able if prices.least and prices.least_price <= self._autos[i].may_lose(probe=True)
            ]
            if self._drafting == able:
                break
            able = self._drafting
        if self._drafting:
            self._plan_drafts(expected)
        else:
            self._shared.rest = REST
        return self._nodes

    def _choose_gaining(self, slots: list[int], expected: Mapping[int, Floats]) -> None:
        """Those of the slots, the most promising first, with whose drafts the round makes most tokens per second."""
        best = self._slots / self._round_s
        if len(slots) > 1:
            slots.sort(key=lambda i: -expected[i].sum())
        while slots:
            _, rate = self._best_size([expected[i] for i in slots], self._prices(len(slots)).added_s)
            if rate > best:
                best, self._gaining = rate, slots
            slots = slots[: len(slots) // 2]

    def _best_size(self, gains: Sequence[Floats], added_s: Floats) -> tuple[int, float]:
        """The number of gains, summed over slots, with most tokens per second, and these."""
        total = gains[0]
        if len(gains) > 1:
            total = np.zeros(max(map(len, gains)))
            for each in gains:
                total[: len(each)] += each
        return _native.best_size(total, added_s, float(self._slots), self._round_s)

    def _prices(self, drafting: int) -> _Prices:
        """What drafts for so many slots take."""
        shared, past = self._shared, self._past
        deepest = max(self._deepest.values())
        kept, key = shared.costs.kept, (drafting, past // STEP, self._slots, self._passes, deepest)
        if key not in kept:
            draft_s, verify_s = shared.costs.draft_s(past, drafting), shared.costs.verify_s(past, self._slots, drafting)
            sizes, half = shared.sizes[1:], drafting // 2
            passes = self._passes if shared.proposes == "block" else sizes
            added_s = passes * draft_s + verify_s[sizes] - self._round_s
            pays = np.minimum(sizes, deepest) * drafting * self._single_s > added_s
            least = 1 + int(np.argmax(pays)) if pays.any() else 0
            price = float(added_s[least - 1]) / drafting / self._single_s
            nodes_s = self._passes * draft_s + verify_s[1:] - self._round_s
            fewer_s = shared.costs.verify_s(past, self._slots, half)[1:] if half else verify_s[1:]
            less_s = self._passes * (draft_s - shared.costs.draft_s(past, half)) if half else 0.0
            slot_s = np.maximum(0.0, less_s + verify_s[1:] - fewer_s) / (drafting - half)
            kept[key] = _Prices(added_s, nodes_s, least, price, slot_s)
        return kept[key]

    def _plan_drafts(self, expected: Mapping[int, Floats]) -> None:
        """Have slots draft for the size of which most is expected, and no less than the smallest that could pay."""
        shared, drafting = self._shared, self._drafting
        self._lowest = self._prices(len(drafting))
        if not self._lowest.least:  # so few could not pay
            self._drafting = []
            return
        place, _ = self._best_size([expected[i] for i in drafting], self._lowest.added_s)
        place = max(place, self._lowest.least)
        size = int(shared.sizes[place])
        if shared.proposes != "block":
            self._passes = size
        for i in drafting:
            self._autos[i].levels = size if shared.proposes == "levels" else None
            if shared.proposes == "tokens" or self._ahead:
                self._nodes[i] = min(size, self._deepest[i]) if shared.proposes == "tokens" else size
                added_s = float(self._lowest.added_s[place - 1]) / len(drafting)
                self._decide(i, self._nodes[i], float(expected[i][:place].sum()), added_s)
            else:
                most = size * 3 // 2 if shared.proposes == "block" else shared.max_nodes
                self._nodes[i] = int(shared.costs.filled[min(most, shared.max_nodes)])

    def choose(self, trees: Sequence[DraftTree | None]) -> list[int]:
        """How many nodes of each slot's tree, in pop order, to verify; None is a slot without a draft."""
        nodes = [0 if tree is None else n for tree, n in zip(trees, self._nodes, strict=True)]
        drafted = [(i, tree) for i in self._drafting if (tree := trees[i]) is not None]
        if not drafted or self._shared.proposes == "tokens":
            return nodes
        count, prices = len(self._drafting), self._prices(len(self._drafting))
        least = int(self._shared.sizes[self._lowest.least])
        accepted = {}
        for i, tree in drafted:
            afforded_s = self._autos[i].may_lose() * self._single_s * count
            most = max(int(prices.nodes_s.searchsorted(afforded_s, side="right")), least)
            accepted[i] = self._autos[i].weigh(tree, self._deepest[i])[:most]
        size, _ = self._best_size(list(accepted.values()), prices.nodes_s)
        tokens = {i: float(each[:size].sum()) for i, each in accepted.items()}
        spent_s = (
            float(prices.nodes_s[size - 1]) if size else self._passes * self._shared.costs.draft_s(self._past, count)
        )
        # What all pay for is shared by what each expects: who expects little is not charged for others' rows.
        slot_s, total = float(prices.slot_s[max(0, size - 1)]), sum(tokens.values())
        common_s = max(0.0, spent_s - slot_s * count)
        for i, each in accepted.items():
            nodes[i], share = min(size, len(each)), tokens[i] / total if total else 1 / len(tokens)
            self._decide(i, nodes[i], tokens[i], slot_s + common_s * share)
        return nodes

    def _decide(self, slot: int, nodes: int, tokens: float, added_s: float) -> None:
        probe = slot not in self._gaining
        self.decisions[slot] = Decision(nodes, 1 + tokens, self._single_s + added_s, self._single_s, probe=probe)

    def weigh(self, slot: int, drafted: DraftTree) -> None:
        """Have the slot's request see what was drafted, of a round planned ahead."""
        if slot in self._autos:
            self._autos[slot].weigh(drafted, self._deepest[slot])

    def took(self, draft_s: float, rest_s: float, nodes: Sequence[int]) -> None:
        """Learn from the round's seconds: of the draft, and of the rest, whose trees had so many nodes each."""
        if not self._autos:
            return
        told = not self._mixed and all(self._unseen[i] <= STEP for i in self._drafting)  # what drafts take as a rule
        self._shared.costs.learn(self._past, len(self._drafting) * told, nodes, draft_s / self._passes, rest_s)
