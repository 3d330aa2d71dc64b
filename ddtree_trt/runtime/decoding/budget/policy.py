"""The rule of automatic budgets, which docs/architecture.md states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt.drafters.kind import Drafts
from ddtree_trt.runtime.decoding.budget.costs import KNOWN, LATEST, OUTLIER, STEP, Costs, Floats
from ddtree_trt.runtime.tree import DraftTree, chain_parents

LOSS = 6.0  # single-token passes that a request may lose by drafting since it last gained; the most it is ahead, too
PROBES, PURSE = 1 / 100, 16.0  # of all single-token passes may be lost by probes; and how many of them are saved up
REPAID = 8  # tokens left for each pass that a probe, or what a drafter has still to take in, may lose
REACHED = 0.8  # most that is expected of a depth where the length is chosen before the drafter has probabilities


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


class FixedBudget(NamedTuple):
    nodes: int
    levels: int | None = None  # of a drafter that drafts level by level; None for as many as nodes


class AutoBudgets:
    """What automatic budgets share: costs, what a new request expects, what probes may lose, and the latest plan."""

    def __init__(self, costs: Costs, max_nodes: int, max_depth: int, proposes: Drafts = "block") -> None:
        """`max_depth`: most tokens of a path. A drafter by tokens makes chains, of a node in each pass."""
        self.costs, self.max_nodes, self.max_depth, self.proposes = costs, max_nodes, max_depth, proposes
        # Sizes [1 + W] compared before a draft, 0 first: numbers of nodes, or of passes where a draft takes several.
        few = np.unique(costs.filled[[0, *costs.few[costs.few <= max_nodes]]])
        self.sizes = few if proposes == "block" else np.arange(1 + max_depth)
        # Tokens [W] that a request without drafts expects each of `sizes` to add to the one below it: at first all.
        self.expected: Floats = np.diff(np.minimum(self.sizes, max_depth).astype(float))
        self.purse, self.rounds = 0.0, 0  # single-token passes that probes may lose; of all plans before the latest
        self.plan = RoundPlan([], [])  # the latest


class AutoBudget:
    """What one request has lost by drafting, and what it expects of a draft."""

    def __init__(self, shared: AutoBudgets) -> None:
        self.shared = shared
        self.levels: int | None = None  # of the next draft, of a drafter by levels
        self.loss, self.last, self.gap = 0.0, 0, 0  # in single-token passes; round of its latest draft; to a probe
        self._drafts, self._promised, self._kept = 0, 1.0, 1.0  # and the tokens that they were expected to add, and did
        # How often walks accept a child at each depth they come to, [2, D]: observed, and predicted by the drafter.
        # Their ratios r_d are shrunk towards r_{d−1}: a node's probability is about q̂ = exp(log_weight) · r_1 ⋯ r_d.
        self.acceptance = np.zeros((2, shared.max_depth))
        # The same whatever the drafter says, and the ratio above the first.
        self._reached, self._root = np.zeros((2, shared.max_depth)), min(REACHED, float(shared.expected[0]))
        self.recent, self.weighed = np.zeros_like(shared.expected), 0  # what its drafts were to add, and how many

    def expected(self, deepest: int) -> Floats:
        """Tokens [W] that each of `sizes` is expected to add to the one below it."""
        if self.shared.proposes != "block":
            ratios = _native.calibrated_ratios(self._reached, KNOWN, OUTLIER, self._root)
            return np.cumprod(np.where(np.arange(len(ratios)) < deepest, ratios, 0.0), dtype=np.float64)
        expected, drafts = self.shared.expected, self.weighed
        expected = (expected + drafts * self.recent) / (1 + drafts) if drafts else expected
        if deepest < self.shared.max_depth:
            expected = np.minimum(np.add.accumulate(expected), deepest)
            expected[1:] -= expected[:-1]
        return expected

    def observe(self, decision: Decision, tree: DraftTree, path: NDArray[np.int32], *, ends: bool = False) -> None:
        """Learn from a verified draft and the accepted path [m], root first. `ends`: the output ends with the path, and
        may have cut it: the round is counted, but is no evidence of the draft's quality."""
        if not decision.drafted:
            return
        shared, added, self._drafts = self.shared, len(path) - 1, self._drafts + 1
        self.last, shared.purse = shared.rounds, shared.purse + PROBES * added
        self._promised, self._kept = self._promised + decision.expected_tokens - 1, self._kept + added
        lost = decision.expected_s / decision.single_token_s - len(path)
        shared.purse -= lost * decision.probe
        if not decision.probe:
            self.loss = max(self.loss + lost, -LOSS)
        elif lost < 0:  # drafting pays again
            self.loss, self.gap = min(self.loss, 0.0), 0
        else:
            self.weighed, self.gap = 0, self.gap + 1
        if self._drafts <= KNOWN:  # tells what a new request is to expect
            own = self.recent if shared.proposes == "block" else self.expected(shared.max_depth)
            shared.expected += LATEST * (min(OUTLIER, self._kept / self._promised) * own - shared.expected)
        if tree.token_ids.size and not ends:
            _native.learn(self.acceptance, tree.parents, tree.log_weights, path, 1 - LATEST)
            if shared.proposes != "block":
                levels, walked = int(tree.depths.max()), np.arange(len(path), dtype=np.int32)
                _native.learn(self._reached, chain_parents(1 + levels), np.zeros(levels), walked, 1 - LATEST)


Budget = FixedBudget | AutoBudget


class SlotInput(NamedTuple):
    past: int  # tokens in front of those to draft
    left: int  # most tokens that may still come, 1 or more
    unseen: int = 0  # tokens of the past that the drafter has still to take in


class RoundPlan:
    """The budgets of a round whose slots share its passes, and where none drafts of those behind it for a while: call
    `ceilings`, then `choose`, then `took`, for each. One size holds for all that draft."""

    def __init__(self, budgets: Sequence[Budget], inputs: Iterable[SlotInput], *, ahead: bool = False) -> None:
        """`inputs`: of the same slots. `ahead`: sizes are chosen before drafts are seen, as for a device's rounds."""
        self._budgets, self._made, self._rest = budgets, 1, 0.0  # rounds begun by it; and more that it holds for
        self.decisions: list[Decision | None] = [None] * len(budgets)  # None for fixed budgets
        self._drafting, self._probes = list[int](), False  # slots; and whether they only see whether it pays again
        self._nodes = [b.nodes if isinstance(b, FixedBudget) else 0 for b in budgets]
        self._autos = {i: b for i, b in enumerate(budgets) if isinstance(b, AutoBudget)}
        if not self._autos:
            return
        self._shared = shared = next(iter(self._autos.values())).shared
        rounds, requests, shared.plan = shared.plan._made, len(shared.plan._autos), self
        shared.rounds += rounds
        shared.purse = min(shared.purse + PROBES * rounds * requests, PURSE)  # each makes a token at least
        self._inputs, self._ahead = list(inputs), ahead
        self._slots, self._past = len(budgets), sum([s.past for s in self._inputs]) // len(budgets)
        self._mixed, self._passes = any(self._nodes), 1  # whether fixed budgets draft, too; of the drafter
        self._deepest = {i: min(self._inputs[i].left - 1, shared.max_depth) for i in self._autos}
        self._round_s = float(shared.costs.verify_s(self._past, self._slots)[0])  # without drafts
        self._single_s = self._round_s / self._slots
        self._left_s = [s.left * self._single_s for s in self._inputs]
        self._unseen_s = [s.unseen * shared.costs.context_s for s in self._inputs]
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
        self.decisions = [single if i in self._autos else None for i in range(self._slots)]
        able = [i for i, deepest in self._deepest.items() if deepest and self._repays[i] >= 0]
        if not able:  # nor will these be later
            self._rest = STEP
        elif self._shared.costs.due > 0 or self._mixed:
            expected = {i: self._autos[i].expected(self._deepest[i]) for i in able}
            self._drafting = self._gaining(able, expected) or self._probing(able)
            if self._drafting:
                self._plan_drafts(expected)
        return self._nodes

    def _gaining(self, able: list[int], expected: Mapping[int, Floats]) -> list[int]:
        """Those of the slots, the most promising first, with whose drafts the round makes most tokens per second."""
        all_s, least, least_s = self._prices(len(able))
        single, drafting = self._slots / self._round_s, list[int]()
        best, may_lose_s = single, LOSS * self._single_s - least_s
        slots = [i for i in able if least and self._autos[i].loss * self._single_s <= may_lose_s]
        sums = {i: float(np.add.reduce(expected[i])) for i in able if slots}
        slots.sort(key=sums.__getitem__, reverse=True)
        while slots:
            gains, added_s = [expected[i] for i in slots], self._prices(len(slots))[0]
            _, rate = _native.best_size(gains, added_s, self._slots, self._round_s)
            if rate > best:
                best, drafting = rate, slots
            slots = slots[: len(slots) // 2]
        # What a drafter has still to take in is repaid by what its drafts are expected to save of the tokens left.
        drafting = [i for i in drafting if self._unseen_s[i] <= (1 - single / best) * self._left_s[i]]
        if 0 < (few := len(drafting)) < len(able):  # whose own rows cost less than they bring join, whatever they lost
            own_s = (all_s - self._prices(few)[0])[least - 1] / (len(able) - few)
            joins = [i for i in able if own_s + self._unseen_s[i] < sums[i] * self._single_s]
            drafting = sorted({*drafting, *joins})
        return drafting if drafting and self._prices(len(drafting))[1] else []  # so few may not pay

    def _probing(self, able: list[int]) -> list[int]:
        """The slots that waited longest for a draft, as few as could gain, if the purse affords it; else all rest."""
        shared, last = self._shared, {i: self._autos[i].last for i in able}
        waits = {i: last[i] + self._autos[i].gap - shared.rounds for i in able}
        self._rest = float(min([STEP, *[wait for wait in waits.values() if wait > 0]]))
        able = sorted([i for i in able if waits[i] <= 0], key=last.__getitem__)
        for count in [1 << n for n in range(len(able).bit_length())]:
            _, least, least_s = self._prices(count)
            slots = [i for i in able if least and least_s <= self._repays[i]]
            missing = least_s * count / self._single_s - shared.purse
            if len(slots) >= count and missing > 0:
                self._rest = min(self._rest, missing / (PROBES * len(self._autos)))
            elif len(slots) >= count:
                self._probes, self._rest, slots = True, 0.0, slots[:count]
                shared.purse -= sum([self._unseen_s[i] for i in slots]) / self._single_s  # so the next ones wait
                return slots
        return []

    def _prices(self, drafting: int) -> tuple[Floats, int, float]:
        """What drafts for so many slots add to the round: seconds [W], of each of `sizes`; the place in `sizes` of the
        smallest that could pay, 0 where none could; and what that adds for each of these slots."""
        shared, past, deepest = self._shared, self._past, max(self._deepest.values())
        kept, key = shared.costs.kept, (drafting, past // STEP, self._slots, deepest)
        if key not in kept:
            sizes, draft_s = shared.sizes[1:], shared.costs.draft_s(past, drafting)
            verify_s = shared.costs.verify_s(past, self._slots, drafting)[sizes]
            added_s = (1 if shared.proposes == "block" else sizes) * draft_s + verify_s - self._round_s
            pays = np.minimum(sizes, deepest) * drafting * self._single_s > added_s
            least = 1 + int(np.argmax(pays)) if pays.any() else 0
            kept[key] = added_s, least, float(added_s[least - 1]) / drafting
        return kept[key]

    def _plan_drafts(self, expected: Mapping[int, Floats]) -> None:
        """Have slots draft for the size of which most is expected, and no less than the smallest that could pay."""
        shared, drafting, kind = self._shared, self._drafting, self._shared.proposes
        added_s, least, _ = self._prices(len(drafting))
        place, _ = _native.best_size([expected[i] for i in drafting], added_s, self._slots, self._round_s)
        size = int(shared.sizes[place := max(place, least)])
        self._least, self._passes = int(shared.sizes[least]), 1 if kind == "block" else size
        most = min(size + 1, shared.max_nodes) if kind == "block" else shared.max_nodes
        for i in drafting:
            self._autos[i].levels = size if kind == "levels" else None
            self._nodes[i] = int(shared.costs.filled[most])
            if kind == "tokens" or self._ahead:
                self._nodes[i] = min(size, self._deepest[i]) if kind == "tokens" else size
                taken_s = self._single_s + float(added_s[place - 1]) / len(drafting)
                tokens = 1 + float(np.add.reduce(expected[i][:place]))
                self.decisions[i] = Decision(self._nodes[i], tokens, taken_s, self._single_s, probe=self._probes)

    def choose(self, trees: Sequence[DraftTree | None]) -> list[int]:
        """How many nodes of each slot's tree, in pop order, to verify; None is a slot without a draft."""
        nodes = [0 if tree is None else n for tree, n in zip(trees, self._nodes, strict=True)]
        drafted = {i: tree for i in self._drafting if (tree := trees[i]) is not None}
        if not drafted or self._shared.proposes == "tokens":
            return nodes
        costs, past, count = self._shared.costs, self._past, len(self._drafting)
        added_s = self._passes * costs.draft_s(past, count) + costs.verify_s(past, self._slots, count) - self._round_s
        may_lose = self._shared.purse / count if self._probes else LOSS - min([self._autos[i].loss for i in drafted])
        afforded = added_s.searchsorted(may_lose * self._single_s * count, side="right") - 1  # nodes
        most = max(int(afforded), self._least)
        accepted = [each[:most] for each in self.weigh(drafted)]
        size, _ = _native.best_size(accepted, added_s[1:], self._slots, self._round_s)
        taken_s = self._single_s + float(added_s[size]) / count
        for i, each in zip(drafted, accepted, strict=True):
            nodes[i] = min(size, len(each))
            tokens = 1 + float(np.add.reduce(each[:size]))
            self.decisions[i] = Decision(nodes[i], tokens, taken_s, self._single_s, probe=self._probes)
        return nodes

    def weigh(self, drafted: Mapping[int, DraftTree]) -> list[Floats]:
        """The acceptance probabilities [n] of the nodes of slots' drafted trees, 0 of those that the output ends above,
        which the requests expect of their next drafts, too. Of a round planned ahead the caller asks, not `choose`."""
        drafts = []
        for i, tree in drafted.items():
            budget = self._autos[i]
            budget.weighed = 1 if self._probes else budget.weighed + 1
            share = max(LATEST, 1 / budget.weighed)
            drafts.append((tree.log_weights, tree.depths, budget.acceptance, self._deepest[i], budget.recent, share))
        return _native.weigh(drafts, self._shared.sizes, KNOWN, OUTLIER)

    def took(self, draft_s: float, rest_s: float, nodes: Sequence[int]) -> None:
        """Learn from the round's seconds: of the draft, and of the rest, whose trees had so many nodes each."""
        if self._autos:
            telling = not self._mixed and max([self._inputs[i].unseen for i in self._drafting], default=0) <= STEP
            drafts = len(self._drafting) * telling  # only what they take as a rule
            self._shared.costs.learn(self._past + self._made, drafts, nodes, draft_s / self._passes, rest_s)
