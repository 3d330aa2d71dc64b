"""Costs of rounds by tree size, context and slots, from the latency profile and the sizes an engine pads its passes to.

Where an engine takes all slots in one pass, they are padded to the widest tree, [N, T], so that another node of the
widest one costs N rows. A slot's costs are then its share of the round's: of the time of single tokens one part for
each slot, of what drafts and their rows add one part for each slot that drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime.decoding.budget.latency import ContextCost, LatencyProfile
from ddtree_trt.runtime.decoding.budget.pace import PROFILED, Pace, Ratios


class Load(NamedTuple):
    """How many slots are in the passes of a round."""

    slots: int = 1  # in the verification
    drafting: int = 1  # in the draft


ALONE = Load()


@dataclass(frozen=True)
class Costs:
    """Costs of rounds at one context length and load, in seconds: the share of one slot that drafts."""

    single_s: float  # a round without drafting
    draft_s: float  # a draft, without the cost per drafted token
    nodes_s: NDArray[np.float64]  # [1 + max_nodes]: verifying n nodes, with the drafter's cost of n tokens
    least: int  # fewest nodes that pay if all possible ones are accepted; 0 where no number does
    deepest: int  # depth below which an accepted node adds no token
    level_s: float = 0.0  # each level of a tree that is drafted level by level; not in `draft_s` unless `at_depth`
    dearness: float = 1.0  # of rounds with drafts against those without, as rounds took, over that of the profile

    @property
    def max_nodes(self) -> int:
        return len(self.nodes_s) - 1

    @property
    def trial_s(self) -> float:
        """Loss of the smallest round that could pay, against a single-token round, when nothing is accepted."""
        return self.round_s(self.least) + self.level_s * self.least - self.single_s

    def round_s(self, nodes: int) -> float:
        """Seconds of a drafting round that verifies `nodes` nodes."""
        return self.draft_s + float(self.nodes_s[nodes])

    def at_depth(self, levels: int) -> Costs:
        """The costs of rounds that draft that many levels."""
        return replace(self, draft_s=self.draft_s + self.level_s * levels, level_s=0.0)

    def affordable(self, loss_s: float) -> int:
        """Most nodes of a round that loses at most `loss_s` against a single-token round when it commits one token, but
        at least as many as could pay."""
        most = int(self.nodes_s.searchsorted(loss_s + self.single_s - self.draft_s, side="right")) - 1
        return max(most, self.least)


@dataclass(frozen=True)
class RoundCosts:
    """Costs of a round of several slots in one pass, in seconds."""

    draft_s: NDArray[np.float64]  # [slots + 1]: a draft for so many of them
    verify_s: NDArray[np.float64]  # [1 + max_nodes]: a verification whose widest tree has n nodes
    dearness: float = 1.0  # as in `Costs`
    hope: float = 1.0  # how much faster rounds without drafts may well be, against those with them

    def round_s(self, drafting: int, nodes: int) -> float:
        """A round in which so many slots draft, and whose widest tree has so many nodes."""
        return float(self.draft_s[drafting] + self.verify_s[nodes])

    def paced(self, pace: Pace) -> RoundCosts:
        """The costs of rounds that take longer, or less long, than the profile says."""
        ratios = pace.ratios
        return RoundCosts(self.draft_s * ratios.drafted, _paced(self.verify_s, ratios), ratios.dearness, pace.hope)


@dataclass(frozen=True)
class _Measured:
    """Costs of one context and number of slots, and what to add for each token of a draft that is made one by one."""

    draft_s: float
    token_s: float
    verify_s: NDArray[np.float64]  # [1 + max_nodes]

    def mix(self, other: _Measured, share: float) -> _Measured:
        """The costs at `share` of the way to the other's."""

        def between(a: Any, b: Any) -> Any:
            return (1 - share) * a + share * b

        return _Measured(
            between(self.draft_s, other.draft_s),
            between(self.token_s, other.token_s),
            between(self.verify_s, other.verify_s),
        )


class CostModel:
    """The latency profile, interpolated over the measured contexts and numbers of slots.

    Where passes are padded, a tree costs as much as the next larger size: the curve is flat up to that size.

    Several slots were measured at one context. A longer one adds for each of them what it adds for one, since slots
    read their own caches; a shorter one is taken to cost the same, because what one slot saves is mostly noise when
    taken times their number. Beyond the most slots that were measured, costs are in proportion to their number. How
    long rounds of several slots really took corrects all these (`pace`).
    """

    STEP = 64  # tokens of context over which costs are taken as constant
    KEPT = 2048  # results that are kept

    def __init__(
        self,
        profile: LatencyProfile,
        max_nodes: int,
        max_depth: int,
        buckets: Sequence[int] | None = None,
        *,
        by_levels: bool = False,
    ) -> None:
        """`buckets`: numbers of tree tokens that passes are padded to, rising; None where they are not. `by_levels`:
        the profile's cost of a drafted token is that of a level of the tree."""
        self._by_levels = by_levels
        self._nodes = np.arange(max_nodes + 1)
        self._max_depth = max_depth
        padded = _padded_nodes(self._nodes, buckets)
        self.filled = _filled(padded)
        self.widths = _widths(self.filled)  # [W], numbers of nodes at which rounds are compared before they are drafted

        def measured(cost: ContextCost) -> _Measured:
            return _Measured(cost.draft_s, cost.draft_token_s, cost.verify_curve(int(padded.max()))[padded])

        self._lengths = np.array([c.context for c in profile.contexts], float)
        self._contexts = [measured(c) for c in profile.contexts]
        self._slots = np.array([1, *(c.slots for c in profile.batches)], float)
        self._context = max((c.context for c in profile.batches), default=0)  # that of the passes of several slots
        alone = _interpolated(self._contexts, self._lengths, self._context)
        self._batches = [alone, *(measured(c) for c in profile.batches)]
        self._known: dict[tuple[int, int, Load, Ratios], Costs] = {}
        self._rounds: dict[tuple[int, int], RoundCosts] = {}
        self._paces: dict[int, Pace] = {}  # by the bits of a number of slots

    def at(self, past: int, left: int | None = None, load: Load = ALONE) -> Costs:
        """Costs at `past` committed tokens, where a round can yield at most `left` ≥ 1 tokens (None: any number)."""
        step, deepest = past // self.STEP, self._max_depth if left is None else min(self._max_depth, left - 1)
        ratios = self._pace(load.slots).ratios if load.slots > 1 else PROFILED
        key = step, deepest, load, ratios
        if (found := self._known.get(key)) is None:
            found = _kept(self._known, self.KEPT, key, self._share((step + 0.5) * self.STEP, deepest, load, ratios))
        return found

    def round(self, past: int, slots: int) -> RoundCosts:
        """Costs of a round of that many slots, which hold `past` tokens on average."""
        return self._profiled(past, slots).paced(self._pace(slots))

    def learn(self, past: int, slots: int, drafting: int, nodes: int, seconds: float) -> None:
        """Take the time of a round of several slots, of which `drafting` drafted, and whose widest tree had `nodes`."""
        expected_s = self._profiled(past, slots).round_s(drafting, min(nodes, self._nodes[-1]))
        self._pace(slots).learn(drafting > 0, seconds / expected_s)

    def _profiled(self, past: int, slots: int) -> RoundCosts:
        key = past // self.STEP, slots
        if (found := self._rounds.get(key)) is None:
            each = [self._of((key[0] + 0.5) * self.STEP, n) for n in range(1, slots + 1)]
            costs = RoundCosts(np.array([0.0, *(cost.draft_s for cost in each)]), each[-1].verify_s)
            found = _kept(self._rounds, self.KEPT, key, costs)
        return found

    def fill(self, nodes: int) -> int:
        """The largest number of nodes verified at the cost of `nodes`."""
        return int(self.filled[nodes])

    def _pace(self, slots: int) -> Pace:
        """That of so many slots, which begins as that of the nearest number known."""
        bits = slots.bit_length()
        if bits not in self._paces:
            near = min(self._paces, key=lambda known: abs(known - bits), default=None)
            self._paces[bits] = Pace(None if near is None else self._paces[near])
        return self._paces[bits]

    def _share(self, past: float, deepest: int, load: Load, ratios: Ratios) -> Costs:
        slots, drafting = load.slots, load.drafting
        verify, draft = _paced(self._of(past, slots).verify_s, ratios), self._of(past, drafting)
        verify = np.maximum(verify, verify[0])  # so that a failed draft always loses
        token_s = ratios.drafted * draft.token_s / drafting
        single_s, draft_s = float(verify[0]) / slots, ratios.drafted * draft.draft_s / drafting
        rows_s = verify / drafting + float(verify[0]) * (1 / slots - 1 / drafting)
        chains_s = rows_s + token_s * self._nodes
        pays = (1 + np.minimum(self._nodes, deepest)) * single_s > draft_s + chains_s
        pays[0] = False
        nodes_s, level_s = (rows_s, token_s) if self._by_levels else (chains_s, 0.0)
        return Costs(single_s, draft_s, nodes_s, self.fill(int(pays.argmax())), deepest, level_s, ratios.dearness)

    def _of(self, past: float, slots: int) -> _Measured:
        """Costs of passes over that many slots with `past` tokens each."""
        if slots == 1:
            return _interpolated(self._contexts, self._lengths, past)
        near, far = self._batches[0], _interpolated(self._contexts, self._lengths, max(past, self._context))
        many, beyond = _interpolated(self._batches, self._slots, slots), max(1.0, slots / self._slots[-1])
        return _Measured(
            beyond * many.draft_s + slots * max(0.0, far.draft_s - near.draft_s),
            beyond * many.token_s + slots * max(0.0, far.token_s - near.token_s),
            beyond * many.verify_s + slots * np.maximum(0.0, far.verify_s - near.verify_s),
        )


def _paced(verify_s: NDArray[np.float64], ratios: Ratios) -> NDArray[np.float64]:
    """Seconds [1 + max_nodes] of verifying, where rounds without and with drafts take `ratios` of what was measured."""
    paced = verify_s * ratios.drafted
    paced[0] = verify_s[0] * ratios.single
    return paced


def _interpolated(costs: Sequence[_Measured], at: NDArray[np.float64], value: float) -> _Measured:
    """The costs at a value between, or at the end nearest to it."""
    place = float(np.interp(value, at, np.arange(len(at))))
    low = int(place)
    return costs[low].mix(costs[min(low + 1, len(costs) - 1)], place - low)


def _kept(known: dict[Any, Any], most: int, key: Any, value: Any) -> Any:
    """The value, kept under the key; where there are too many, the others are forgotten."""
    if len(known) >= most:
        known.clear()
    known[key] = value
    return value


def _padded_nodes(nodes: NDArray[np.int64], buckets: Sequence[int] | None) -> NDArray[np.int64]:
    """How many nodes a pass over each number of `nodes` [n] computes."""
    if buckets is None:
        return nodes
    sizes = np.array(buckets)
    places = np.minimum(sizes.searchsorted(nodes + 1), len(sizes) - 1)
    return np.maximum(sizes[places] - 1, nodes)


def _filled(padded: NDArray[np.int64]) -> NDArray[np.int64]:
    """Largest n with the padded size of each n, both [1 + max_nodes]."""
    return padded.searchsorted(padded, side="right") - 1


def _widths(filled: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers of nodes, rising by a half or less, each filled up to what is paid for."""
    powers = 2 ** np.arange(len(filled).bit_length())
    steps = np.concatenate((powers, powers[1:] * 3 // 2))
    return np.unique(filled[steps[steps < len(filled)]])
