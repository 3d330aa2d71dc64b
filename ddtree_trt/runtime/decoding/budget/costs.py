"""What passes cost on this machine: a coarse profile, corrected by the time of rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime.engines.profile import Correction, Profile

STEP = 64  # tokens of context over which costs are taken as constant
SLOWEST = 1 / 32  # least weight of a new round in a mean
OUTLIER = 2.0  # most times the mean so far that is believed: a pass may have waited for other work
PACE = 1 / 2  # weight of a round of a well-known kind in what all take at the moment
KNOWN = 4  # rounds of a kind after which it has half that weight, and which an earlier process's count as at most
KINDS = 256  # of rounds, whose figures in the profile are kept
REFRESH = 16  # rounds after which costs follow what they have shown; the first do so at once
WARM = 8  # rounds without drafts in a row, of which the later half tells; then the last: the first take longer
SINGLES, SELDOM = 8, 512  # rounds with drafts before the first such row; and, four times as many each time, at most


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
        self._profile = profile
        tokens, powers = np.arange(1, max_nodes + 2), 2 ** np.arange(int(max_nodes).bit_length() + 1)
        self._padded = buckets is not None
        sizes = np.unique([powers, powers * 3 // 2]) if buckets is None else np.array(buckets)
        self._tokens = np.maximum(sizes[np.minimum(sizes.searchsorted(tokens), len(sizes) - 1)], tokens)  # computed
        self.filled = self._tokens.searchsorted(self._tokens, side="right") - 1  # most nodes at the cost of n
        found = (replace(each, rounds=min(each.rounds, KNOWN)) for each in profile.corrections)  # maybe of a busy hour
        self._means = {(each.kind, each.slots, each.size): each for each in found}
        self._pace = 1.0  # how many times as long as those means all rounds take at the moment
        self.kept: dict[Any, Any] = {}  # what was computed of these costs, until rounds have changed them
        self._unread: list[tuple[int, int, int, float, float, float, bool]] = []  # rounds, as `learn` takes them
        self.rounds = self._row = 0  # learnt from; and those without drafts since one with
        # Rounds with drafts, which say little of what those without take: between rows of these, and until the next.
        self._gap = self.due = SINGLES
        # What the profile says does not change, and there are few kinds of rounds.
        self._profiled_draft_s = lru_cache(KINDS)(self._draft_at)
        self._profiled_verify_s = lru_cache(KINDS)(self._verify_at)
        self._profiled_curve = lru_cache(KINDS)(self._curve_at)

    @property
    def corrected(self) -> Profile:
        self._read()
        means = (replace(each, ratio=each.ratio * self._pace) for each in self._means.values())
        return replace(self._profile, corrections=tuple(means))

    @property
    def context_s(self) -> float:
        """What the first draft behind a prompt takes longer, for each of its tokens."""
        return 0.0 if self._profile.far is None else self._profile.far.context_s  # the first of all drafts is slower

    def verify_s(self, past: int, slots: int, trees: int | None = None) -> NDArray[np.float64]:
        """[1 + max_nodes]: all of a round but the draft, where so many of the slots, or all, have trees of n nodes."""
        trees = slots if trees is None or self._padded else trees
        key = "verify", past // STEP, slots, trees
        if key not in self.kept:
            sizes, seconds = self._profiled_curve(past // STEP, slots, trees)
            costs = self._pace * seconds * np.interp(sizes, *self._ratios("verify", slots))
            self.kept[key] = np.maximum(costs, costs[0])  # so that a draft of which nothing is accepted always loses
        return self.kept[key]

    def draft_s(self, past: int, slots: int) -> float:
        """A draft for so many slots, or each pass of a drafter that makes several."""
        key = "draft", past // STEP, slots
        if key not in self.kept:
            ratio = self._pace * self._ratios("draft", slots)[1][0]
            self.kept[key] = ratio * self._profiled_draft_s(past // STEP, slots)
        return self.kept[key]

    def learn(self, past: int, drafting: int, nodes: Sequence[int], draft_s: float, rest_s: float) -> None:
        """Take a round's seconds, if it tells: of the draft (each pass) for `drafting` slots, the rest with `nodes`."""
        widest = min(max(nodes), len(self._tokens) - 1)
        behind, self._row = self._row, 0 if widest or drafting else self._row + 1
        if self._row % WARM and not WARM / 2 < self._row < WARM:
            return
        if widest:
            self.due -= 1
        elif self._row % WARM == 0:
            self._gap = self.due = min(4 * self._gap, SELDOM)
        tokens = float(self._tokens[widest]) if self._padded else 1 + sum(nodes) / len(nodes)
        self._unread.append((past, len(nodes), drafting, tokens, draft_s, rest_s, behind > self._row))
        self.rounds += 1
        if self.rounds <= REFRESH or len(self._unread) >= REFRESH:
            self._read()

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for past, slots, drafting, tokens, draft_s, rest_s, first in unread:
            profiled_s = self._profiled_verify_s(past // STEP, slots, tokens)
            self._correct("verify", slots, round(2 * math.log2(tokens)), rest_s / profiled_s, first)
            if drafting:
                self._correct("draft", drafting, 0, draft_s / self._profiled_draft_s(past // STEP, drafting), first)
        self.kept.clear()

    def _correct(self, kind: str, slots: int, size: int, ratio: float, first: bool) -> None:
        key, rounds = (kind, slots.bit_length(), size), 0
        if (known := self._means.get(key)) is not None:
            mean, rounds = known.ratio, known.rounds
        else:
            mean = float(np.interp(size, *self._ratios(kind, slots)))
        if first and rounds and ratio > mean * self._pace:
            return  # that says nothing
        surprise = min(max(ratio / (mean * self._pace), 1 / OUTLIER), OUTLIER)
        # A kind that is known tells how busy the machine is, which slows all of them down; a new one tells of itself.
        self._pace *= surprise ** (PACE * rounds / (rounds + KNOWN))
        self._means[key] = Correction(*key, mean * surprise ** max(SLOWEST, 1 / (2 + rounds)), rounds + 1)

    def _ratios(self, kind: str, slots: int) -> tuple[list[int], list[float]]:
        """The sizes known, rising, and the ratio of each at the nearest number of slots for which it is."""
        near: dict[int, tuple[int, float]] = {}
        for each in self._means.values():
            if each.kind == kind:
                found = abs(each.slots - slots.bit_length()), each.ratio
                near[each.size] = min(near.get(each.size, found), found)
        sizes = sorted(near) or [0]
        return sizes, [near[size][1] if near else 1.0 for size in sizes]

    # Of the profile, behind so many steps of context.

    def _draft_at(self, steps: int, slots: int) -> float:
        return max(1e-9, float(self._profile.at(steps * STEP, slots, lambda times: np.array(times.draft_s))))

    def _verify_at(self, steps: int, slots: int, tokens: float) -> float:
        return float(self._profile.at(steps * STEP, slots, lambda times: times.verify_s(np.array(tokens))))

    def _curve_at(self, steps: int, slots: int, trees: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Sizes, as corrections have them, and seconds of `verify_s`, both [1 + max_nodes]."""
        tokens = 1 + (self._tokens - 1) * (trees / slots)
        return 2 * np.log2(tokens), self._profile.at(steps * STEP, slots, lambda times: times.verify_s(tokens))
