"""The rule of automatic budgets, which docs/architecture.md states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt.drafters.kind import Drafts
from ddtree_trt.runtime.decoding.budget.costs import STEP, Costs
from ddtree_trt.runtime.tree import DraftTree, chain_parents

LOSS = 6.0  # single-token passes that a request may lose by drafting since it last gained; the most it is ahead, too
PROBES, PURSE = 1 / 100, 16.0  # of all single-token passes may be lost by probes; and how many of them are saved up
REPAID = 8  # tokens left for each pass that a probe, or what a drafter has still to take in, may lose
RECENT = 1 / 16  # least weight of the latest draft in what a request expects of the next one
NEWS = 1 / 16  # weight of each of a request's drafts, up to four, in what all expect
REACHED = 0.8  # most that is expected of a depth where the length is chosen before the drafter has probabilities
REST = 64  # most rounds that a plan without drafts is kept for
PRIOR, MEMORY = 4.0, 48.0  # pseudo-observations of a calibration, and rounds after which its evidence counts a third
LOWEST, HIGHEST = 0.02, 2.0  # bounds of its ratios, so that a streak of luck has a bounded effect

Floats = NDArray[np.float64]
_sum = np.add.reduce


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
    nodes: int
    levels: int | None = None  # of a drafter that drafts level by level; None for as many as nodes


class AutoBudgets:
    """What automatic budgets share: costs, what a new request expects, what probes may lose, and the latest plan."""

    def __init__(self, costs: Costs, max_nodes: int, max_depth: int, proposes: Drafts = "block") -> None:
        """`max_depth`: most tokens of a path. A drafter by tokens makes chains, of a node in each pass."""
        self.costs, self.max_nodes, self.max_depth, self.proposes = costs, max_nodes, max_depth, proposes
        powers = 2 ** np.arange(max_nodes.bit_length())
        nodes = np.unique([0, *powers, *(powers * 3 // 2)])
        # Sizes [1 + W] compared before a draft, 0 first: numbers of nodes, or of passes where a draft takes several.
        self.sizes = np.arange(1 + max_depth)
        if proposes == "block":
            self.sizes = np.unique(costs.filled[nodes[nodes <= max_nodes]])
        # Tokens [W] that a request without drafts expects each of `sizes` to add to the one below it: at first all.
        self.expected: Floats = np.diff(np.minimum(self.sizes, max_depth).astype(float))
        self.purse = 0.0  # single-token passes that probes may lose
        self.rounds = 0  # of all plans before the latest
        self.plan = RoundPlan([], [])  # the latest


class AutoBudget:
    """What one request has lost by drafting, and what it expects of a draft."""

    def __init__(self, shared: AutoBudgets) -> None:
        self.shared = shared
        self.levels: int | None = None  # of the next draft, of a drafter by levels
        self.loss, self.last = 0.0, 0  # in single-token passes; round of its latest draft
        self._drafts, self._promised, self._kept = 0, 1.0, 1.0  # and the tokens that they were expected to add, and did
        # How often walks accept one of the children at each depth that they come to, [2, D]: observed, and predicted by
        # the drafter's mass of them. Their ratios r_d are shrunk towards r_{d−1}, and a node is accepted with
        # probability about q̂ = exp(log_weight) · r_1 ⋯ r_d.
        self.acceptance = np.zeros((2, shared.max_depth))
        # The same whatever the mass, and the ratio above the first.
        self._reached, self._root = np.zeros((2, shared.max_depth)), min(REACHED, float(shared.expected[0]))
        self.recent, self.weighed = np.zeros_like(shared.expected), 0  # what its drafts were to add, and how many

    def expected(self, deepest: int) -> Floats:
        """Tokens [W] that each of `sizes` is expected to add to the one below it."""
        if self.shared.proposes == "block":
            expected = self.shared.expected
            if self.weighed:
                expected = self.recent + (expected - self.recent) / (1 + self.weighed)
            whole = deepest == self.shared.max_depth
            return expected if whole else np.diff(np.minimum(np.cumsum(expected), deepest), prepend=0.0)
        ratios = _native.calibrated_ratios(self._reached, PRIOR, LOWEST, HIGHEST, self._root)
        ratios[deepest:] = 0.0
        return np.cumprod(ratios, dtype=np.float64)

    def observe(self, decision: Decision, tree: DraftTree, path: NDArray[np.int32], *, ends: bool = False) -> None:
        """Learn from a verified draft and the accepted path [m], root first. `ends`: the output ends with the path, and
        may have cut it: the round is counted, but is no evidence of the draft's quality."""
        if not decision.drafted:
            return
        shared, added, self._drafts = self.shared, len(path) - 1, self._drafts + 1
        self.last, shared.purse = shared.rounds, min(shared.purse + PROBES * added, PURSE)
        self._promised, self._kept = self._promised + decision.expected_tokens - 1, self._kept + added
        lost = decision.expected_s / decision.single_token_s - len(path)
        if not decision.probe:
            self.loss = max(self.loss + lost, -LOSS)
        else:
            shared.purse -= lost
            if lost < 0:  # drafting pays again
                self.loss = min(self.loss, 0.0)
            else:
                self.weighed = 0
        if self._drafts <= 4:
            proven = min(HIGHEST, self._kept / self._promised) * self.expected(shared.max_depth)
            shared.expected += NEWS * (proven - shared.expected)
        if tree.token_ids.size and not ends:
            _native.learn(self.acceptance, tree.parents, tree.log_weights, path, 1 - 1 / MEMORY)
            if shared.proposes != "block":
                levels, walked = int(tree.depths.max()), np.arange(len(path), dtype=np.int32)
                _native.learn(self._reached, chain_parents(1 + levels), np.zeros(levels), walked, 1 - 1 / MEMORY)


Budget = FixedBudget | AutoBudget


class SlotInput(NamedTuple):
    past: int  # tokens in front of those to draft
    left: int  # most tokens that may still come, 1 or more
    unseen: int = 0  # tokens of the past that the drafter has still to take in


class _Prices(NamedTuple):
    """What drafts for some of the slots of a round take."""

    added_s: Floats  # [W]: what drafts of each of `sizes` add to the round
    nodes_s: Floats  # [max_nodes]: what drafts add of which so many nodes are verified
    least: int  # place in `sizes` of the smallest draft that could pay; 0 where none could
    least_price: float  # what that costs each of the slots, in single-token passes


class RoundPlan:
    """The budgets of a round whose slots share its passes, and where none drafts of those behind it for a while: call
    `ceilings`, then `choose`, then `took`, for each.

    One size holds for all that draft. Where passes are padded, every node of it is a row for the other slots, too.
    """

    def __init__(self, budgets: Sequence[Budget], inputs: Iterable[SlotInput], *, ahead: bool = False) -> None:
        """`inputs`: of the same slots. `ahead`: sizes are chosen before the drafts are seen, as for rounds that a
        device makes."""
        self._budgets, self._made, self._rest = budgets, 1, 0.0  # rounds begun by it; and more that it holds for
        self.decisions: list[Decision | None] = [None] * len(budgets)  # None for fixed budgets
        self._drafting: list[int] = []  # slots of automatic budgets
        self._probes = False  # whether those that draft only see whether it pays again
        self._nodes = [b.nodes if isinstance(b, FixedBudget) else 0 for b in budgets]
        self._autos = {i: b for i, b in enumerate(budgets) if isinstance(b, AutoBudget)}
        if not self._autos:
            return
        self._shared = shared = next(iter(self._autos.values())).shared
        rounds, requests, shared.plan = shared.plan._made, len(shared.plan._autos), self
        shared.rounds += rounds
        shared.purse = min(shared.purse + PROBES * rounds * requests, PURSE)  # each makes a token at least
        slots, self._ahead = list(inputs), ahead
        self._slots, self._past = len(slots), sum([s.past for s in slots]) // len(slots)
        self._mixed, self._passes = any(self._nodes), 1  # whether fixed budgets draft, too; of the drafter
        self._deepest = {i: min(slots[i].left - 1, shared.max_depth) for i in self._autos}
        self._round_s = float(shared.costs.verify_s(self._past, self._slots)[0])  # without drafts
        self._single_s = self._round_s / self._slots
        self._unseen, context_s = [s.unseen for s in slots], shared.costs.context_s
        self._unseen_s = [context_s * unseen for unseen in self._unseen]
        self._left_s = [s.left * self._single_s for s in slots]
        self._repays = {i: self._left_s[i] / REPAID - self._unseen_s[i] for i in self._autos}

    @classmethod
    def of(cls, budgets: Sequence[Budget], inputs: Iterable[SlotInput], *, ahead: bool = False) -> RoundPlan:
        """The plan of the round before, if it holds for these requests; else a new one, which alone reads `inputs`."""
        last = next((b.shared.plan for b in budgets if isinstance(b, AutoBudget)), None)
        if last is not None and last._made <= last._rest and last._budgets == budgets:
            last._made += 1
            return last
        return cls(budgets, inputs, ahead=ahead)

    def ceilings(self) -> list[int]:
        """Most nodes to draft for each slot; 0 skips the drafter. Sets the levels of drafts by levels."""
        if not self._autos or self._made > 1:
            return self._nodes
        single = Decision(0, 1.0, self._single_s, self._single_s, drafted=False)
        for i in self._autos:
            self.decisions[i] = single
        able = [i for i, deepest in self._deepest.items() if deepest and self._repays[i] >= 0]
        if not able:  # nor will these be later
            self._rest = REST
        if not able or (self._shared.costs.due <= 0 and not self._mixed):
            return self._nodes
        expected, prices = {i: self._autos[i].expected(self._deepest[i]) for i in able}, self._prices(len(able))
        self._choose_drafting(
            [i for i in able if prices.least and prices.least_price <= LOSS - self._autos[i].loss], expected
        )
        drafting = len(self._drafting)
        if not drafting:
            self._drafting, self._probes = self._probe(able), True
        elif drafting < len(able):  # those whose own rows cost less than they bring join, whatever they have lost
            rest_s = prices.added_s - self._prices(drafting).added_s
            added = rest_s[prices.least - 1] / (len(able) - drafting)
            self._drafting = [
                i for i in able if i in self._drafting or added + self._unseen_s[i] < _sum(expected[i]) * self._single_s
            ]
        if self._drafting:
            self._plan_drafts(expected)
        return self._nodes

    def _probe(self, able: list[int]) -> list[int]:
        """The slots that waited longest for a draft, as few as could gain, if the purse affords it; else all rest."""
        shared, count, rest = self._shared, 1, float(REST)
        alone_s = self._prices(1).least_price * self._single_s
        able.sort(key=lambda i: (self._repays[i] < alone_s, self._autos[i].last))
        while count <= len(able):
            prices, slots = self._prices(count), able[:count]
            if prices.least and all(prices.least_price * self._single_s <= self._repays[i] for i in slots):
                if (missing := prices.least_price * count - shared.purse) <= 0:
                    shared.purse -= sum([self._unseen_s[i] for i in slots]) / self._single_s  # so the next one waits
                    return slots
                rest = min(rest, missing / (PROBES * len(self._autos)))
            count *= 2
        self._rest = rest
        return []

    def _choose_drafting(self, slots: list[int], expected: Mapping[int, Floats]) -> None:
        """Those of the slots, the most promising first, with whose drafts the round makes most tokens per second."""
        single = best = self._slots / self._round_s
        sums = {i: _sum(expected[i]) for i in slots}
        slots.sort(key=sums.__getitem__, reverse=True)
        while slots:
            gains, added_s = [expected[i] for i in slots], self._prices(len(slots)).added_s
            _, rate = _native.best_size(gains, added_s, self._slots, self._round_s)
            if rate > best:
                best, self._drafting = rate, slots
            slots = slots[: len(slots) // 2]
        # What a drafter has still to take in is repaid by what its drafts are expected to save of the tokens left.
        self._drafting = [i for i in self._drafting if self._unseen_s[i] <= (1 - single / best) * self._left_s[i]]

    def _prices(self, drafting: int) -> _Prices:
        shared, past = self._shared, self._past
        deepest = max(self._deepest.values())
        kept, key = shared.costs.kept, (drafting, past // STEP, self._slots, self._passes, deepest)
        if key not in kept:
            draft_s, verify_s = shared.costs.draft_s(past, drafting), shared.costs.verify_s(past, self._slots, drafting)
            sizes = shared.sizes[1:]
            passes = self._passes if shared.proposes == "block" else sizes
            added_s = passes * draft_s + verify_s[sizes] - self._round_s
            pays = np.minimum(sizes, deepest) * drafting * self._single_s > added_s
            least = 1 + int(np.argmax(pays)) if pays.any() else 0
            price = float(added_s[least - 1]) / drafting / self._single_s
            nodes_s = self._passes * draft_s + verify_s[1:] - self._round_s
            kept[key] = _Prices(added_s, nodes_s, least, price)
        return kept[key]

    def _plan_drafts(self, expected: Mapping[int, Floats]) -> None:
        """Have slots draft for the size of which most is expected, and no less than the smallest that could pay."""
        shared, drafting = self._shared, self._drafting
        self._lowest = self._prices(len(drafting))
        if not self._lowest.least:  # so few could not pay
            self._drafting = []
            return
        gains = [expected[i] for i in drafting]
        place, _ = _native.best_size(gains, self._lowest.added_s, self._slots, self._round_s)
        size = int(shared.sizes[place := max(place, self._lowest.least)])
        if shared.proposes != "block":
            self._passes = size
        for i in drafting:
            self._autos[i].levels = size if shared.proposes == "levels" else None
            if shared.proposes == "tokens" or self._ahead:
                self._nodes[i] = min(size, self._deepest[i]) if shared.proposes == "tokens" else size
                taken_s = self._single_s + float(self._lowest.added_s[place - 1]) / len(drafting)
                tokens = 1 + float(_sum(expected[i][:place]))
                self.decisions[i] = Decision(self._nodes[i], tokens, taken_s, self._single_s, probe=self._probes)
            else:
                most = size + 1 if shared.proposes == "block" else shared.max_nodes
                self._nodes[i] = int(shared.costs.filled[min(most, shared.max_nodes)])

    def choose(self, trees: Sequence[DraftTree | None]) -> list[int]:
        """How many nodes of each slot's tree, in pop order, to verify; None is a slot without a draft."""
        nodes = [0 if tree is None else n for tree, n in zip(trees, self._nodes, strict=True)]
        drafted = {i: tree for i in self._drafting if (tree := trees[i]) is not None}
        if not drafted or self._shared.proposes == "tokens":
            return nodes
        shared, count = self._shared, len(self._drafting)
        prices = self._prices(count)
        may_lose = shared.purse / count if self._probes else LOSS - min([self._autos[i].loss for i in drafted])
        afforded = prices.nodes_s.searchsorted(may_lose * self._single_s * count, side="right")
        most = max(int(afforded), int(shared.sizes[self._lowest.least]))
        accepted = [each[:most] for each in self.weigh(drafted)]
        size, _ = _native.best_size(accepted, prices.nodes_s, self._slots, self._round_s)
        spent_s = float(prices.nodes_s[size - 1]) if size else self._passes * shared.costs.draft_s(self._past, count)
        taken_s = self._single_s + spent_s / count
        for i, each in zip(drafted, accepted, strict=True):
            nodes[i] = min(size, len(each))
            tokens = 1 + float(_sum(each[:size]))
            self.decisions[i] = Decision(nodes[i], tokens, taken_s, self._single_s, probe=self._probes)
        return nodes

    def weigh(self, drafted: Mapping[int, DraftTree]) -> list[Floats]:
        """The acceptance probabilities [n] of the nodes of slots' drafted trees, 0 of those that the output ends above,
        which the requests expect of their next drafts, too. Of a round planned ahead the caller asks, not `choose`."""
        drafts = []
        for i, tree in drafted.items():
            budget = self._autos[i]
            budget.weighed = 1 if self._probes else budget.weighed + 1
            share = max(RECENT, 1 / budget.weighed)
            drafts.append((tree.log_weights, tree.depths, budget.acceptance, self._deepest[i], budget.recent, share))
        return _native.weigh(drafts, self._shared.sizes, PRIOR, LOWEST, HIGHEST)

    def took(self, draft_s: float, rest_s: float, nodes: Sequence[int]) -> None:
        """Learn from the round's seconds: of the draft, and of the rest, whose trees had so many nodes each."""
        if self._autos:
            late = [i for i in self._drafting if self._unseen[i] > STEP]
            drafts = 0 if self._mixed or late else len(self._drafting)  # only what they take as a rule
            self._shared.costs.learn(self._past + self._made, drafts, nodes, draft_s / self._passes, rest_s)
