"""The account of a request: the time it has gained or lost by drafting, in seconds, and whether it drafts on.

A drafting round gains the time its tokens would have taken one by one, less its duration. To draft or not is a bandit
with two arms, of which one, single tokens, is known. The rule is bounded both ways:

- A request drafts until it has lost more than `STAKE`; after a round without gain, the next one is no larger than may
  lose `TRIAL`. Then it makes single tokens. So if nothing it drafts is accepted, it loses less than STAKE + TRIAL;
  where a draft alone costs a pass, that is one TRIAL.
- Losses of other requests have no effect. A request's first draft always runs, at the same size after any history, and
  decides: no sequence of poor requests stops drafting for one that would gain by it.
- One draft may be unlucky. If the tokens behind the one it missed are those it had at their positions, the request
  drafts again; the second and third time since it last gained, two and three such tokens are needed. A drafter that
  does not know the text has no such matches, so this costs nothing there; an adversarial drafter costs three TRIALs.
- Single-token rounds of an engine, of any request, save `SHARE` of their time, which pays for probes. So probes cost no
  more than that share, and the time until the next probe is the price of a probe divided by the share.

In a pass with others a slot's share of the time counts (`crowd`), and the number of slots changes. A balance keeps its
worth in tokens, and what stopped among many slots is tried again among half as many. Each request's own evidence does
not suffice there: where a draft costs more than a pass, a round that may lose `TRIAL` at most is too small to gain, and
a slot that stops leaves its part of the rows to the others, which may then stop as well, one after the other. So what
drafts of all slots gained lately decides how a request begins. While they gain, its first draft is as large as is
expected to pay, and bad luck may cost it `COMMON_STAKE`, or as much as `UNLUCKY` trials. Where they lose, a first draft
that may cost more than `TRIAL` is a probe. So good requests after many useless ones may wait long where a draft costs
several passes: a probe of one slot pays the rows of all.

A useless drafter then costs less than 5 % of an answer of 48 tokens. Where even the smallest round that could pay may
lose more than TRIAL, it is that round that a request's first draft costs.

Mixed traffic takes at most 1.05 times the best choice for each request in hindsight where a draft costs up to a pass.
Where it costs 1.5 passes, that is up to 1.08: the trial that fits into those 5 % is a chain of three tokens, which also
half of the good requests fail. It is up to 1.07 for a drafter that drafts token by token and is right in about half of
its tokens, so that drafting and not drafting take about as long.
"""

from __future__ import annotations

import numpy as np

from ddtree_trt.runtime.decoding.budget.costs import Costs
from ddtree_trt.runtime.tree import DraftTree

STAKE = 0.9  # most loss of a request before it stops drafting, in single-token passes
COMMON_STAKE = 2.5  # the same of a request in a pass with others, while their drafts gain ...
UNLUCKY = 4  # ... or so many trials without gain, where they cost more
COMMON_MEMORY = 256  # rounds of single slots by which it is known whether they do
TRIAL = 2.0  # most loss of a round after a round without gain, in single-token passes
PROOF = 3.0  # gain of a request, in single-token passes, before others learn from it: less may be luck
SHARE = 1 / 128  # of the time of single-token rounds
MEMORY = 32.0  # rounds after which the weight of a gain is a third, so that a request that gets worse is noticed
PATIENCE = 2  # after so many failed probes a request waits for 2 ** PATIENCE prices: newer ones come first


class Savings:
    """What the requests of an engine have in common: the time that single-token rounds have saved for probes, and
    whether drafts of requests in one pass gain."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.promised = 0.0  # to probes of the round of several slots that is under way
        # Recent means of a slot's draft in a pass with others. They begin with a small gain, so that drafts of a new
        # engine are made as if they gained; one round of some slots that lose is enough to end that.
        self._tokens = 0.02
        self._price = 0.0  # in single tokens, by the profile

    def add(self, costs: Costs) -> None:
        """Save for a single-token round."""
        most_s = 2**PATIENCE * costs.trial_s
        self.seconds = max(self.seconds, min(self.seconds + SHARE * costs.single_s, most_s))

    def book(self, costs: Costs, cost_s: float, tokens: int) -> None:
        """Take a slot's draft in a pass with others."""
        self._tokens += (tokens - self._tokens) / COMMON_MEMORY
        self._price += (cost_s / costs.single_s / costs.dearness - self._price) / COMMON_MEMORY

    def trend(self, dearness: float) -> float:
        """Recent mean gain of a slot's draft in a pass with others, in single tokens, where rounds with drafts are so
        much dearer than in the profile. That is learnt from rounds: drafts that were taken to lose may have gained."""
        return self._tokens - dearness * self._price


class Account:
    """One request's gains and losses, which decide whether it drafts."""

    def __init__(self, savings: Savings) -> None:
        self._savings = savings
        self._balance_s = 0.0
        self._failed = 0  # probes in a row that did not gain
        self._matches = 0  # tokens after the latest draft that it had at their positions
        self._resumed = 0  # times that matches resumed drafting since the request last gained
        self._latest_gained = False  # whether the latest draft gained
        self._slots = self._stopped_among = 1  # slots of the current round, and of the one at which drafting stopped
        self._single_s = 0.0  # this slot's share of a round without drafts, among so many slots
        self.drafted = False  # whether it has drafted yet
        self.stopped = False  # whether the request makes single tokens, except for probes
        self.probing = False  # whether the current round is a probe
        self.looking = False  # whether it drafts only to see what is expected of a draft now
        self.proved = False  # whether drafting has gained more than luck explains

    @property
    def gains(self) -> bool:
        """Whether drafting has gained so far."""
        return self._balance_s > 0 and not self.stopped

    def enter(self, slots: int, single_s: float) -> None:
        """Begin a round among so many slots, without drafts `single_s` long for this one. A token's worth is that of
        the round; what drafting among more slots could not gain is tried again when half of them have gone."""
        if slots != self._slots:
            self._balance_s *= single_s / self._single_s if self._single_s else 1.0
            if self.stopped and 2 * slots <= self._stopped_among:
                self._resume(single_s)
        self._slots, self._single_s = slots, single_s

    def may_draft(self, costs: Costs) -> bool:
        """Whether the next round drafts. If not, it is a single-token round, which saves for probes."""
        if not costs.least:
            return False
        others_lose = self._slots > 1 and not self._others_gain(costs)
        first_lost = not self.drafted and others_lose and costs.trial_s > TRIAL * costs.single_s
        if not self.stopped and not first_lost:
            return True
        self.probing = self._affords_probe(costs)
        return self.probing

    def may_look(self, costs: Costs) -> bool:
        """`may_draft` of a request that has not stopped, but is not expected to gain in this round."""
        self.looking = self._affords_probe(costs)
        return self.looking

    def _affords_probe(self, costs: Costs) -> bool:
        price_s, savings = costs.trial_s * 2 ** min(self._failed, PATIENCE), self._savings
        promised_s = savings.promised if self._slots > 1 else 0.0
        if savings.seconds - promised_s < price_s:
            savings.add(costs)
            return False
        if self._slots > 1:
            savings.promised += price_s
        return True

    def most_nodes(self, costs: Costs) -> int:
        """Most nodes that the next round may draft and verify."""
        if self.gains or self._latest_gained or self._others_gain(costs):
            return costs.max_nodes
        if self._slots > 1 and (self.probing or self.looking):
            return costs.max_nodes  # from the savings, which go into debt
        return costs.affordable(TRIAL * costs.single_s)

    def settle(self, costs: Costs, cost_s: float, tokens: int) -> None:
        """Book a drafting round of `cost_s` that committed `tokens` tokens."""
        gain_s = tokens * costs.single_s - cost_s
        self._latest_gained = gain_s > 0
        self.drafted = True
        self._matches = 0
        if self.probing or self.looking:
            self._savings.seconds -= cost_s - costs.single_s
        if self.looking:
            self.looking = False
            return
        if self._slots > 1:
            self._savings.book(costs, cost_s, tokens)
        if self.probing:
            self.probing = False
            self.stopped = gain_s <= 0
            self._failed = self._failed + 1 if self.stopped else 0
            self._balance_s = gain_s
        else:
            weight = 1 - 1 / MEMORY if self._balance_s > 0 else 1.0
            self._balance_s = weight * self._balance_s + gain_s
            self.stopped = self._balance_s < -self._stake_s(costs)
        self._stopped_among = self._slots
        self.proved = not self.stopped and self._balance_s > PROOF * costs.single_s
        if self.gains:
            self._resumed = 0

    def _others_gain(self, costs: Costs) -> bool:
        """Whether the round is one with others, and drafts in such rounds gain."""
        return self._slots > 1 and self._savings.trend(costs.dearness) > 0

    def _stake_s(self, costs: Costs) -> float:
        """Most loss of the request before it stops drafting."""
        if self._others_gain(costs):
            return max(COMMON_STAKE * costs.single_s, UNLUCKY * costs.trial_s)
        return STAKE * costs.single_s

    def match(self, costs: Costs) -> None:
        """Book a token that the draft which ended drafting had at its position; enough of them resume drafting."""
        self._matches += 1
        if self.stopped and self._matches > self._resumed:
            self._resumed += 1
            self._resume(costs.single_s)

    def _resume(self, single_s: float) -> None:
        """Draft again; alone until a round loses, among others until the request has lost what is left of its stake."""
        self.stopped = False
        self._balance_s = -STAKE * single_s

    def stop(self, costs: Costs) -> None:
        """Make single tokens from the next round on, because no draft is expected to gain."""
        self.stopped = True
        self._stopped_among = self._slots
        self.probing = False
        self._savings.add(costs)


class FailedDraft:
    """A draft after which drafting stopped. It was unlucky if the target's tokens behind the missed one match it."""

    MAX_POSITIONS = 3  # positions behind the missed token that are compared

    def __init__(self, tree: DraftTree, missed: int) -> None:
        """`missed`: depth of the first token that was not in the tree."""
        self._tree = tree
        self._depth = missed
        self._last_depth = missed + self.MAX_POSITIONS

    def matches(self, token: int) -> bool:
        """Whether the next token is the draft's most probable one at its position. Call it with every token."""
        self._depth += 1
        at_depth = np.flatnonzero(self._tree.depths == self._depth)
        return self._depth <= self._last_depth and at_depth.size > 0 and token == self._tree.token_ids[at_depth[0]]
