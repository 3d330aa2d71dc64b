"""Whether drafting pays for a request: what it has gained or lost, in seconds.

A drafting round gains the time its tokens would have taken one by one, less its own. To draft or not is a bandit with
two arms, of which one, single tokens, is known. The rule is bounded both ways:

- A request drafts until it has lost more than `STAKE`; a round that follows no gain is no larger than may lose `TRIAL`.
  Then it makes single tokens. So if nothing it drafts is accepted, it loses less than STAKE + TRIAL; where a draft
  alone costs a pass, that is one TRIAL.
- Nothing that others lost counts. A request's own first draft always runs, at the same size after any history, and
  decides: no sequence of poor requests takes drafting away from one it would pay for.
- One draft may be unlucky. If the tokens behind the one it missed are those it had for their places, the request drafts
  again; the second and third time since it last gained, two and three such tokens are needed. Text the drafter knows
  nothing of gives no such sign, so this costs nothing there; against a drafter made to deceive it costs three TRIALs.
- Single-token rounds of an engine, whichever request makes them, save `SHARE` of their time, which pays for probes. So
  probes cost no more than that share, and drafting is tried again after the price of a probe over that share.

A useless drafter then costs less than 5 % of an answer of 48 tokens. Where even the smallest round that could pay may
lose more than TRIAL, it is that round that a request's first draft costs.

Mixed traffic takes at most 1.05 times the best choice for each request in hindsight where a draft costs up to a pass.
Where it costs 1.5 passes, that is up to 1.08: the trial that fits into those 5 % is a chain of three tokens, which also
half of the good requests fail. It is up to 1.07 for a drafter that drafts token by token and is right in about half of
its tokens, so that drafting and not drafting take about as long.
"""

from __future__ import annotations

from ddtree_trt.runtime.decoding.costs import Costs

STAKE, TRIAL = 0.9, 2.0  # what a request may lose, in single-token passes
PROOF = 3.0  # what a request has gained, in single-token passes, before others learn from it: less may be luck
SHARE = 1 / 128  # of the time of single-token rounds
MEMORY = 32.0  # rounds after which a gain counts for a third, so that a request that gets worse is noticed
PATIENCE = 2  # a request whose probes failed so often waits for 2 ** PATIENCE prices: newer ones come first


class Savings:
    """What the single-token rounds of an engine have saved for probes."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, costs: Costs) -> None:
        """A single-token round is made."""
        most_s = 2**PATIENCE * costs.trial_s
        self.seconds = max(self.seconds, min(self.seconds + SHARE * costs.single_s, most_s))


class Account:
    """One request's gains and losses, and with them whether it drafts."""

    def __init__(self, savings: Savings) -> None:
        self._savings = savings
        self._balance_s = 0.0
        self._failed = 0  # probes in a row that did not gain
        self._foreseen = 0  # tokens after the latest draft that it had for their places
        self._reconsidered = 0  # times since the request last gained
        self._paid = False  # its latest draft
        self.stopped = self.probing = False
        self.proved = False  # whether drafting has gained more than luck may

    @property
    def gains(self) -> bool:
        """Whether drafting has gained so far."""
        return self._balance_s > 0 and not self.stopped

    def may_draft(self, costs: Costs) -> bool:
        """Whether the next round drafts; if not, it is a single-token round, and saves."""
        if not costs.least:
            return False
        if not self.stopped:
            return True
        if self._savings.seconds < costs.trial_s * 2 ** min(self._failed, PATIENCE):
            self._savings.add(costs)
            return False
        self.probing = True
        return True

    def most_nodes(self, costs: Costs) -> int:
        """What the next round may verify and draft."""
        return costs.most if self.gains or self._paid else costs.affordable(TRIAL * costs.single_s)

    def settle(self, costs: Costs, nodes: int, tokens: int) -> None:
        """A drafting round verified so many nodes and committed so many tokens."""
        cost_s = costs.round_s(nodes)
        gain_s = tokens * costs.single_s - cost_s
        self._paid, self._foreseen = gain_s > 0, 0
        if self.probing:
            self._savings.seconds -= cost_s - costs.single_s
            self.probing = False
            self.stopped = gain_s <= 0
            self._failed = self._failed + 1 if self.stopped else 0
            self._balance_s = gain_s
        else:
            kept = 1 - 1 / MEMORY if self._balance_s > 0 else 1.0
            self._balance_s = kept * self._balance_s + gain_s
            self.stopped = self._balance_s < -STAKE * costs.single_s
        self.proved = not self.stopped and self._balance_s > PROOF * costs.single_s
        if self.gains:
            self._reconsidered = 0

    def foreseen(self, costs: Costs) -> None:
        """A token after the draft that ended drafting is the one that draft had for its place."""
        self._foreseen += 1
        if self.stopped and self._foreseen > self._reconsidered:
            self._reconsidered += 1
            self.stopped, self._balance_s = False, -STAKE * costs.single_s

    def stop(self, costs: Costs) -> None:
        """What is known of the request promises no gain: make single tokens, beginning with the next round."""
        self.stopped, self.probing = True, False
        self._savings.add(costs)
