"""Automatic tree budgets.

`auto` follows the rule of CaDDTree (arXiv 2606.01813): of the heap's pop order take the prefix of n nodes that
maximises expected tokens per second, (1 + Σ q̂) / (C_draft + C_verify(n, context)), with the costs of the engine's
latency profile and q̂ calibrated online.

Whether to draft at all is decided before the drafter runs, by the time drafting has gained for the request (`account`).
Other requests start from a calibration that has learnt only from requests that gained by drafting. Requests in one pass
choose together (`crowd`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt.runtime.decoding.budget.account import TRIAL, Account, FailedDraft, Savings
from ddtree_trt.runtime.decoding.budget.base import Decision
from ddtree_trt.runtime.decoding.budget.calibration import Calibration, Outlook
from ddtree_trt.runtime.decoding.budget.costs import ALONE, CostModel, Load
from ddtree_trt.runtime.decoding.budget.latency import LatencyProfile
from ddtree_trt.runtime.tree import EMPTY, DraftTree, chain


class AutoBudgets:
    """State shared by the sequences of one engine: its costs, the calibration learnt from requests that gain, and the
    time saved for probes."""

    REQUEST_MEMORY = 48.0  # rounds
    ENGINE_MEMORY = 512.0  # rounds
    REQUEST_PRIOR = 4.0  # pseudo-observations per depth
    ENGINE_PRIOR = 4.0  # pseudo-observations per depth
    OUTLOOK_MEMORY = 16.0  # rounds, of a request; those of the engine count four times as long
    CHAIN_PRIOR = 0.8  # prior acceptance rate of a chain, whose length is chosen before the drafter has probabilities

    def __init__(
        self,
        profile: LatencyProfile,
        max_nodes: int,
        max_depth: int,
        *,
        buckets: Sequence[int] | None = None,
        chains: bool = False,
        by_levels: bool = False,
    ) -> None:
        """`buckets`: numbers of tree tokens the engine pads a verification to. `chains`: the drafter drafts token by
        token, so that the budget, the length γ of its chain, is chosen before it runs. `by_levels`: it drafts a tree
        level by level, so that the number of levels is chosen before, and the nodes of the tree behind."""
        self.costs = CostModel(profile, max_nodes, max_depth, buckets, by_levels=by_levels)
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self.weighs_load = True  # whether costs are those of rounds with other slots in one pass
        self._kind: type[AutoBudget] = AutoLength if chains else AutoDepth if by_levels else AutoBudget
        self._reset()

    def _reset(self) -> None:
        """Start with the state of an engine that has served no request."""
        root = self.CHAIN_PRIOR if self._kind is AutoLength else 1.0
        prior, memory = self.ENGINE_PRIOR, self.ENGINE_MEMORY
        self.calibration = Calibration(self.max_depth, prior=prior, memory=memory, root=root)
        self.levels = Calibration(self.max_depth, prior=prior, memory=memory, root=self.CHAIN_PRIOR)
        self.savings = Savings()
        # At first as if all drafted tokens were accepted.
        self.outlook = Outlook(np.minimum(self.costs.widths, self.max_depth), self.OUTLOOK_MEMORY * 4)

    def for_sequence(self, *, alone: bool = False) -> AutoBudget:
        """The budget of one sequence. `alone`: as if there were no other, so that its budgets are repeatable."""
        shared = self
        if alone:
            shared = copy.copy(self)
            shared.weighs_load = False
            shared._reset()
        return self._kind(shared)


class AutoBudget:
    """Chooses the budget of each round by expected tokens per second: alone, or with others in one pass (`crowd`)."""

    by_rows = True  # whether nodes are chosen of a drafted tree, and not before it is drafted

    def __init__(self, shared: AutoBudgets) -> None:
        self.shared = shared
        self._calibration = Calibration(
            shared.max_depth, prior=shared.REQUEST_PRIOR, memory=shared.REQUEST_MEMORY, parent=shared.calibration
        )
        self._account = Account(shared.savings)
        self._costs = shared.costs.at(0)
        self._largest = 16
        self._drafted = EMPTY
        self._failed: FailedDraft | None = None
        self._outlook = Outlook(shared.outlook.tokens, shared.OUTLOOK_MEMORY)
        self.levels: int | None = None
        self.last: Decision | None = None

    def ceiling(self, past: int, left: int, load: Load = ALONE) -> int:
        """`Budget.ceiling` in a round of that load, whose slots hold `past` tokens on average."""
        self._costs = self.shared.costs.at(past, left, load)
        self._account.enter(load.slots, self._costs.single_s)
        if self._account.may_draft(self._costs) and (nodes := self._draft_nodes()):
            return nodes
        return self._skip()

    def _skip(self) -> int:
        self.last = Decision(0, 1.0, self._costs.single_s, self._costs.single_s, drafted=False)
        return 0

    def _draft_nodes(self) -> int:
        """Most nodes to draft; 0 skips the drafter."""
        return self.shared.costs.fill(min(self._largest * 3 // 2, self.shared.max_nodes))

    def choose(self, tree: DraftTree, past: int) -> int:
        n = self._best(tree.log_weights, tree.depths, self.least)
        self._took(n, tree)
        return n

    def _took(self, nodes: int, tree: DraftTree) -> None:
        self._largest = max(nodes, self._largest * 3 // 4, 8)
        self._drafted = tree

    def _best(self, log_weights: NDArray[np.float64], depths: NDArray[np.int32], least: int) -> int:
        """The size of the most profitable prefix of a tree, of `least` nodes or more, that the account affords. Rows
        that the engine would pad are used."""
        costs = self._costs
        largest = self._account.most_nodes(costs)
        nodes, expected = _native.best_prefix(
            log_weights[:largest],
            depths[:largest],
            self._ratios(),
            costs.draft_s,
            costs.nodes_s,
            filled=self.shared.costs.filled,
            least=least,
        )
        self.last = Decision(nodes, expected, costs.round_s(nodes), costs.single_s, probe=self._account.probing)
        return nodes

    def _ratios(self) -> NDArray[np.float64]:
        """The calibration of the round. A probe expects the acceptance of requests that gain."""
        ratios = (self.shared.calibration if self._account.probing else self._calibration).ratios()
        ratios[self._costs.deepest :] = 0.0  # the output ends above these depths
        return ratios

    # In a pass with others

    @property
    def stopped(self) -> bool:
        """Whether the request makes single tokens, except for probes."""
        return self._account.stopped

    @property
    def least(self) -> int:
        """Fewest nodes of this round's tree: a probe's must be able to pay."""
        return self._costs.least if self._account.probing or self._account.looking else 0

    @property
    def must_draft(self) -> bool:
        """Whether this round drafts, whatever is expected of it: it is a probe, or the request's first draft."""
        first = not self._account.drafted and self._costs.trial_s <= TRIAL * self._costs.single_s
        return self._account.probing or first

    @property
    def outlook(self) -> NDArray[np.float64]:
        """Tokens [W] that drafts of `CostModel.widths` nodes are expected to add, this round's not yet known."""
        if not self._account.drafted:
            return np.minimum(self.shared.outlook.tokens, self._costs.deepest)
        if not self._outlook.rounds:  # it drafted alone
            self._outlook.learn(self._at_widths(self.weigh(self._drafted)))
        return np.minimum(self._outlook.tokens, self._costs.deepest)

    def put_off(self) -> int:
        """`ceiling` where the round gains more without this draft: 0, or now and then a draft to see if that lasts."""
        return self._draft_nodes() if self._account.may_look(self._costs) else self._skip()

    def join(self, past: int, left: int, load: Load) -> None:
        """Take the costs of a round in which it is known how many slots draft."""
        self._costs = self.shared.costs.at(past, left, load)

    def weigh(self, tree: DraftTree) -> NDArray[np.float64]:
        """Acceptance probabilities [n] of the nodes of a tree, as many as the account affords."""
        most = self._account.most_nodes(self._costs)
        return _native.acceptances(tree.log_weights[:most], tree.depths[:most], self._ratios())

    def settle(self, tree: DraftTree, accepted: NDArray[np.float64], nodes: int, cost_s: float) -> None:
        """Take the choice of `nodes` nodes of a weighed tree, for which the slot pays `cost_s` above a single token."""
        expects = self._at_widths(accepted)
        self._outlook.learn(expects)
        if len(tree):  # one that a constraint left nothing of says nothing about others' drafts
            self.shared.outlook.learn(expects)
        self._took(nodes, tree)
        expected = 1 + float(accepted[:nodes].sum())
        single_s = self._costs.single_s
        self.last = Decision(nodes, expected, single_s + cost_s, single_s, probe=self._account.probing)

    def _at_widths(self, accepted: NDArray[np.float64]) -> NDArray[np.float64]:
        reached = np.concatenate(([0.0], np.cumsum(accepted)))
        return reached[np.minimum(self.shared.costs.widths, len(accepted))]

    # After the round

    def observe(self, tree: DraftTree, path: NDArray[np.int32], next_token: int, *, ends: bool = False) -> None:
        if self.last is None:
            return
        if not self.last.drafted:
            if self._failed is not None and self._failed.matches(next_token):
                self._account.match(self._costs)
            return
        self._account.settle(self._costs, self.last.expected_s, len(path))
        if ends:
            return
        self._calibration.observe(tree, path, share=self._account.proved)
        self._failed = None
        if self._account.stopped:
            self._failed = FailedDraft(self._drafted, len(path))
            self._calibration.withhold()


class AutoLength(AutoBudget):
    """Chooses the length γ of each round's chain, for a drafter that drafts token by token.

    The length is chosen before anything is drafted, so the surrogate of a token is the recent acceptance rate of its
    depth.
    """

    by_rows = False

    def __init__(self, shared: AutoBudgets) -> None:
        super().__init__(shared)
        self._longest_chain = chain(np.zeros(shared.max_depth, np.int32))
        self._first_round = True

    def _draft_nodes(self) -> int:
        trial = self._first_round or self._account.probing
        self._first_round = False
        longest = self._longest_chain
        length = self._best(longest.log_weights, longest.depths, self._costs.least if trial else 0)
        if not length:
            self._account.stop(self._costs)
        return min(length, self._costs.deepest)

    def choose(self, tree: DraftTree, past: int) -> int:
        self._drafted = tree
        return len(tree)


class AutoDepth(AutoBudget):
    """Chooses the levels of each round's draft before it runs, and of the drafted tree the nodes to verify, for a
    drafter that drafts a tree level by level.

    The surrogate of a level is how often walks came to its depth from the one above. A round's costs are those of its
    levels, and of verifying as many nodes as recent rounds did.
    """

    by_rows = False

    def __init__(self, shared: AutoBudgets) -> None:
        super().__init__(shared)
        self._reached = Calibration(
            shared.max_depth, prior=shared.REQUEST_PRIOR, memory=shared.REQUEST_MEMORY, parent=shared.levels
        )
        self._deepest_chain = chain(np.zeros(shared.max_depth, np.int32))
        self._first_round = True

    def _draft_nodes(self) -> int:
        trial = self._first_round or self._account.probing
        self._first_round = False
        self.levels = self._choose_levels(self._costs.least if trial else 0)
        if not self.levels:
            self._account.stop(self._costs)
            return 0
        self._costs = self._costs.at_depth(self.levels)
        return super()._draft_nodes()

    def _choose_levels(self, least: int) -> int:
        """The most profitable number of levels, `least` or more."""
        costs, longest = self._costs, self._deepest_chain
        ratios = (self.shared.levels if self._account.probing else self._reached).ratios()
        most = min(costs.deepest, len(longest), costs.max_nodes)
        levels = np.arange(most + 1)
        nodes = np.maximum(levels, min(self._largest, costs.max_nodes))
        rounds_s = costs.level_s * levels + costs.nodes_s[np.where(levels, nodes, 0)]
        chosen, _ = _native.best_prefix(
            longest.log_weights[:most], longest.depths[:most], ratios, costs.draft_s, rounds_s, least=least
        )
        return chosen

    def observe(self, tree: DraftTree, path: NDArray[np.int32], next_token: int, *, ends: bool = False) -> None:
        drafted = self.last is not None and self.last.drafted and len(tree) > 0
        super().observe(tree, path, next_token, ends=ends)
        if drafted and not ends:
            walked = np.arange(len(path), dtype=np.int32)
            self._reached.observe(chain(np.zeros(tree.depths.max(), np.int32)), walked, share=self._account.proved)
            if self._account.stopped:
                self._reached.withhold()
