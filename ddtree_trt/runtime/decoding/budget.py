"""How many draft nodes a round verifies.

`auto` follows the rule of CaDDTree (arXiv 2606.01813): of the heap's pop order take the prefix of n nodes that
maximises expected tokens per second, (1 + Σ q̂) / (C_draft + C_verify(n, context)), with the costs of the engine's
latency profile and q̂ calibrated online.

Whether to draft at all is decided before the drafter runs, by what drafting has gained for the request (`account`).
What is learnt of a request that does not gain stays its own: others start from what requests that gain have shown.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt.runtime.decoding.account import Account, Savings
from ddtree_trt.runtime.decoding.calibration import Calibration
from ddtree_trt.runtime.decoding.costs import CostModel
from ddtree_trt.runtime.decoding.latency import LatencyProfile
from ddtree_trt.runtime.tree import EMPTY, DraftTree, chain


@dataclass(frozen=True)
class Decision:
    """Why a round had the budget it had."""

    nodes: int
    expected_tokens: float  # 1 + Σ q̂ over the chosen nodes
    expected_s: float  # C_draft + C_verify
    single_token_s: float  # what a round without drafting costs
    drafted: bool = True
    probe: bool = False  # drafted only to see whether drafting pays again

    @property
    def expected_gain(self) -> float:
        """Expected tokens per second over those without drafting."""
        return self.expected_tokens * self.single_token_s / self.expected_s


class Budget(Protocol):
    """Chooses the tree size of every round of one sequence."""

    last: Decision | None  # of the latest round; None where nothing was decided

    def ceiling(self, past: int, left: int) -> int:
        """Most nodes worth drafting for at `past` committed tokens, where at most `left` ≥ 1 tokens may still come; 0
        skips the drafter this round."""

    def choose(self, tree: DraftTree, past: int) -> int:
        """How many nodes of the tree, in pop order, to verify."""

    def observe(self, tree: DraftTree, path: NDArray[np.int32], next_token: int, *, ends: bool = False) -> None:
        """Learn from a verified tree, the accepted path [m], root first, and the target's choice at its end. `ends`:
        the answer ends there and may have cut the path, which says nothing of the draft: only the cost counts."""


class FixedBudget:
    """The same budget every round."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.last: Decision | None = None

    def ceiling(self, past: int, left: int) -> int:
        return self.nodes

    def choose(self, tree: DraftTree, past: int) -> int:
        return self.nodes

    def observe(self, tree: DraftTree, path: NDArray[np.int32], next_token: int, *, ends: bool = False) -> None:
        pass


class AutoBudgets:
    """What the sequences of one engine share: its costs, what those that gain have learnt about the drafter, and what
    is saved for probes."""

    REQUEST_MEMORY, ENGINE_MEMORY = 48.0, 512.0  # rounds
    REQUEST_PRIOR, ENGINE_PRIOR = 4.0, 4.0  # pseudo-observations per depth
    CHAIN_PRIOR = 0.8  # how often a drafted token is accepted, before any was seen, where no drafter says its odds

    def __init__(
        self,
        profile: LatencyProfile,
        max_nodes: int,
        max_depth: int,
        *,
        buckets: Sequence[int] | None = None,
        chains: bool = False,
    ) -> None:
        """`buckets`: numbers of tree tokens the engine pads a verification to. `chains`: the drafter drafts token by
        token, so that the budget, its γ, is chosen before it runs."""
        self.costs = CostModel(profile, max_nodes, max_depth, buckets)
        self.max_nodes, self.max_depth = max_nodes, max_depth
        self._kind: type[AutoBudget] = AutoLength if chains else AutoBudget
        self._forget()

    def _forget(self) -> None:
        """Begin as on an engine that has seen no request."""
        root = self.CHAIN_PRIOR if self._kind is AutoLength else 1.0
        self.calibration = Calibration(self.max_depth, prior=self.ENGINE_PRIOR, memory=self.ENGINE_MEMORY, root=root)
        self.savings = Savings()

    def for_sequence(self, *, alone: bool = False) -> AutoBudget:
        """`alone`: it learns from nothing but its own rounds, so that the same rounds have the same budgets again."""
        shared = self
        if alone:
            shared = copy.copy(self)
            shared._forget()
        return self._kind(shared)


class _FailedDraft:
    """A draft that ended drafting. Where the target goes on as it says behind the token it missed, it was unlucky."""

    PLACES = 3  # how far behind the missed token

    def __init__(self, tree: DraftTree, missed: int) -> None:
        """`missed`: depth of the first token that was not in the tree."""
        self._tree, self._depth, self._last = tree, missed, missed + self.PLACES

    def foresaw(self, token: int) -> bool:
        """Whether the next token is the most probable one of the draft for its place."""
        self._depth += 1
        at_depth = np.flatnonzero(self._tree.depths == self._depth)
        return self._depth <= self._last and at_depth.size > 0 and token == self._tree.token_ids[at_depth[0]]


class AutoBudget:
    """The best budget of each round, by expected tokens per second."""

    def __init__(self, shared: AutoBudgets) -> None:
        self._shared = shared
        self._calibration = Calibration(
            shared.max_depth,
            prior=shared.REQUEST_PRIOR,
            memory=shared.REQUEST_MEMORY,
            parent=shared.calibration,
        )
        self._account = Account(shared.savings)
        self._costs = shared.costs.at(0)
        self._largest = 16
        self._drafted = EMPTY
        self._failed: _FailedDraft | None = None
        self.last: Decision | None = None

    def ceiling(self, past: int, left: int) -> int:
        self._costs = self._shared.costs.at(past, left)
        if self._account.may_draft(self._costs) and (most := self._most()):
            return most
        self.last = Decision(0, 1.0, self._costs.single_s, self._costs.single_s, drafted=False)
        return 0

    def _most(self) -> int:
        """Nodes worth building a tree of."""
        return self._shared.costs.fill(min(self._largest * 3 // 2, self._shared.max_nodes))

    def choose(self, tree: DraftTree, past: int) -> int:
        n = self._best(tree.log_weights, tree.depths, least=self._costs.least if self._account.probing else 0)
        self._largest = max(n, self._largest * 3 // 4, 8)
        self._drafted = tree
        return n

    def _best(self, log_weights: NDArray[np.float64], depths: NDArray[np.int32], least: int) -> int:
        """The most profitable beginning of a tree that has `least` nodes or more and that the account affords. Rows
        that the engine would pad are used. A probe expects of the drafter what requests that gain have seen of it."""
        account, costs = self._account, self._costs
        ratios = (self._shared.calibration if account.probing else self._calibration).ratios()
        ratios[costs.deepest :] = 0.0  # the answer ends above these depths
        most = account.most_nodes(costs)
        nodes, expected = _native.best_prefix(
            log_weights[:most],
            depths[:most],
            ratios,
            costs.draft_s,
            costs.nodes_s,
            filled=self._shared.costs.filled,
            least=least,
        )
        self.last = Decision(nodes, expected, costs.round_s(nodes), costs.single_s, probe=account.probing)
        return nodes

    def observe(self, tree: DraftTree, path: NDArray[np.int32], next_token: int, *, ends: bool = False) -> None:
        if self.last is None:
            return
        if not self.last.drafted:
            if self._failed is not None and self._failed.foresaw(next_token):
                self._account.foreseen(self._costs)
            return
        self._account.settle(self._costs, self.last.nodes, len(path))
        if ends:
            return
        self._calibration.observe(tree, path, share=self._account.proved)
        self._failed = None
        if self._account.stopped:
            self._failed = _FailedDraft(self._drafted, len(path))
            self._calibration.withhold()


class AutoLength(AutoBudget):
    """The best length γ of each round's chain, for a drafter that drafts token by token.

    The length is chosen before anything is drafted, so that the surrogate is how often a token at each depth was
    accepted lately.
    """

    def __init__(self, shared: AutoBudgets) -> None:
        super().__init__(shared)
        self._any = chain(np.zeros(shared.max_depth, np.int32))
        self._new = True

    def _most(self) -> int:
        trial = self._new or self._account.probing
        self._new = False
        length = self._best(self._any.log_weights, self._any.depths, self._costs.least if trial else 0)
        if not length:
            self._account.stop(self._costs)
        return min(length, self._costs.deepest)

    def choose(self, tree: DraftTree, past: int) -> int:
        self._drafted = tree
        return len(tree)
