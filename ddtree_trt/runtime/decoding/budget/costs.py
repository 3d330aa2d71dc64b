"""What passes cost on this machine: a coarse profile, corrected by the time of rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime.engines.profile import Correction, Profile

STEP = 64  # tokens of context over which costs are taken as constant, and rounds over which a plan without drafts holds
LATEST = 1 / 16  # least weight of the latest observation in a mean
KNOWN = 4  # observations that weigh as much as what was known before, or in an earlier process; drafts that tell others
OUTLIER = 2.0  # most times as much as expected that is believed, so that a streak of luck has a bounded effect
ROW = 8  # rounds without drafts made in a row, of which the later half tells, then one in STEP: the first take longer

Floats = NDArray[np.float64]


class Costs:
    """Seconds of passes by slots, tokens of context and tree nodes: a profile, continued linearly in all three.

    Rounds correct it: by one ratio for all, the pace of the moment, since other work slows down what is seldom made,
    too; and by mean ratios for each power of two of slots, of drafts, and of verifications (with all else of a round)
    for each half power of two of tree tokens. Between sizes seen they are interpolated; others take the nearest one's.
    Passes that are not padded take what they would if the rows of all their trees were shared equally.
    """

    def __init__(self, profile: Profile, max_nodes: int, buckets: Sequence[int] | None = None) -> None:
        """`buckets`: numbers of tree tokens that passes are padded to, rising. Where they are not, trees have one of
        few sizes nevertheless: a pass like the one before is quicker, and its time is soon known."""
        self._profile, self._padded = profile, buckets is not None
        tokens, powers = np.arange(1, max_nodes + 2), 2 ** np.arange(int(max_nodes).bit_length() + 1)
        self.few = np.unique([powers, powers * 3 // 2])
        sizes = self.few if buckets is None else np.array(buckets)
        self._tokens = np.maximum(sizes[np.minimum(sizes.searchsorted(tokens), len(sizes) - 1)], tokens)  # computed
        self.filled = self._tokens.searchsorted(self._tokens, side="right") - 1  # most nodes at the cost of n
        self.context_s = profile.far.context_s if profile.far else 0.0  # of a draft, for each token still to take in
        self._means = {(c.kind, c.slots, c.size): (c.ratio, min(c.rounds, KNOWN)) for c in profile.corrections}
        self._pace = 1.0  # how many times as long as those mean ratios all rounds take at the moment
        # Those that costs are of, until rounds have changed them, and what was computed of these.
        self._shown, self.kept = (self._pace, self._means), dict[Any, Any]()
        self.rounds = self._row = 0  # learnt from; and without drafts in a row
        # Rounds with drafts, which say little of what others take, between such rows, more and more; until the next.
        self._gap = self.due = ROW
        self._profiled = lru_cache(self._profiled_at)

    @property
    def corrected(self) -> Profile:
        means = (Correction(*key, ratio * self._pace, rounds) for key, (ratio, rounds) in self._means.items())
        return replace(self._profile, corrections=tuple(means))

    def verify_s(self, past: int, slots: int, trees: int | None = None) -> Floats:
        """[1 + max_nodes]: all of a round but the draft, where so many of the slots, or all, have trees of n nodes."""
        trees = slots if trees is None or self._padded else trees
        key = "verify", past // STEP, slots, trees
        if key not in self.kept:
            _, tokens, seconds = self._profiled(past // STEP, slots, trees)
            costs = self._shown[0] * seconds * np.interp(2 * np.log2(tokens), *self._ratios("verify", slots))
            costs = costs[self._tokens - 1]
            self.kept[key] = np.maximum(costs, costs[0])  # so that a draft of which nothing is accepted always loses
        return self.kept[key]

    def draft_s(self, past: int, slots: int) -> float:
        """A draft for so many slots, or each pass of a drafter that makes several."""
        key = "draft", past // STEP, slots
        if key not in self.kept:
            profiled_s, _, _ = self._profiled(past // STEP, slots, slots)
            self.kept[key] = self._shown[0] * profiled_s * self._ratios("draft", slots)[1][0]
        return self.kept[key]

    def learn(self, past: int, drafting: int, nodes: Sequence[int], draft_s: float, rest_s: float) -> None:
        """Take a round's seconds, if it tells: of the draft (each pass) for `drafting` slots, the rest with `nodes`."""
        widest = max(nodes)
        behind, self._row = self._row, 0 if widest or drafting else self._row + 1
        if widest >= len(self._tokens) or (self._row % STEP and not ROW / 2 < self._row <= ROW):
            return
        if self._row == 0:
            self.due -= 1
        elif self._row % ROW == 0:
            self._gap = self.due = min(4 * self._gap, ROW * STEP)
        tokens = float(self._tokens[widest]) if self._padded else 1 + sum(nodes) / len(nodes)
        slots, first, self.rounds = len(nodes), behind > self._row, self.rounds + 1
        profiled_s = np.interp(tokens, *self._profiled(past // STEP, slots, slots)[1:])
        self._correct("verify", slots, round(2 * math.log2(tokens)), rest_s / float(profiled_s), first)
        if drafting:
            self._correct("draft", drafting, 0, draft_s / self._profiled(past // STEP, drafting, drafting)[0], first)
        if self.rounds <= 2 * ROW or self.rounds % (2 * ROW) == 0:  # the first at once
            self._shown, self.kept = (self._pace, dict(self._means)), {}

    def _correct(self, kind: str, slots: int, size: int, ratio: float, first: bool) -> None:
        key = kind, slots.bit_length(), size
        mean, rounds = self._means.get(key) or (float(np.interp(size, *self._ratios(kind, slots))), 0)
        surprise = min(max(ratio / (mean * self._pace), 1 / OUTLIER), OUTLIER)
        if first and rounds and surprise > 1:  # a draft behind rounds without tells only what it takes at most
            return
        # Half of what a known kind tells is how busy the machine is, which slows down all; a new one tells of itself.
        self._pace *= surprise ** (rounds / (rounds + KNOWN) / 2)
        self._means[key] = mean * surprise ** max(LATEST, 1 / (2 + rounds)), rounds + 1

    def _ratios(self, kind: str, slots: int) -> tuple[list[int], list[float]]:
        """The sizes known, rising, and the ratio of each at the nearest number of slots for which it is."""
        near: dict[int, tuple[int, float]] = {}
        for (its_kind, its_slots, size), (ratio, _) in self._shown[1].items():
            if its_kind == kind:
                found = abs(its_slots - slots.bit_length()), ratio
                near[size] = min(near.get(size, found), found)
        sizes = sorted(near) or [0]
        return sizes, [near[size][1] if near else 1.0 for size in sizes]

    def _profiled_at(self, steps: int, slots: int, trees: int) -> tuple[float, Floats, Floats]:
        """Of the profile: seconds of a draft; tokens a slot, rising, and the rest of a round of so many, both [T]."""
        at, tokens = partial(self._profile.at, steps * STEP, slots), 1 + np.arange(self._tokens[-1]) * (trees / slots)
        draft_s = float(at(lambda times: np.array(times.draft_s)))
        return max(1e-9, draft_s), tokens, at(lambda times: times.verify_s(tokens))
