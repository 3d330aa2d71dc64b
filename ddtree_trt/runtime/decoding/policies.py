"""Tree policies: which of a drafter's candidates become nodes of a tree of a given budget.

A policy is one `Policy` object in the table `POLICIES`. The trees of each nest: that of a smaller budget is the
beginning of that of a larger one, because none chooses its expansions by the budget. So automatic budgets, which cut a
tree to its most profitable beginning, work with all of them. The command line reads the names: loading this module
loads no NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from ddtree_trt.drafters.kind import EXPANDED

if TYPE_CHECKING:
    from ddtree_trt.runtime.candidates import Candidates
    from ddtree_trt.runtime.tree import DraftTree


@cache
def _tree() -> ModuleType:
    """The module of the heap: imported at the first round, once."""
    from ddtree_trt.runtime import tree

    return tree


@cache
def _growth() -> ModuleType:
    """The module of trees that grow depth by depth, likewise."""
    from ddtree_trt.runtime.decoding import growth

    return growth


# Functions of the candidates, the most nodes, the most tokens of a path, and the width; None is no limit.


def _heap(candidates: Candidates, budget: int, max_depth: int | None, width: int | None) -> DraftTree:
    return _tree().best_tree(candidates, budget, max_depth=max_depth, width=width)


def _eagle2(candidates: Candidates, budget: int, max_depth: int | None, width: int | None) -> DraftTree:
    return _growth().eagle2(candidates, budget, max_depth, width or EAGLE2.width)


def _beam(candidates: Candidates, budget: int, max_depth: int | None, width: int | None) -> DraftTree:
    return _growth().beam(candidates, budget, max_depth, width or BEAM.width)


def _chain(candidates: Candidates, budget: int, max_depth: int | None, width: int | None) -> DraftTree:
    return _tree().best_tree(candidates, budget, max_depth=max_depth, width=1)


@dataclass(frozen=True)
class Policy:
    """A way to choose the nodes of a tree."""

    name: str
    makes: str  # description of the tree, for documents
    grow: Callable[[Candidates, int, int | None, int | None], DraftTree]
    width: int | None = None  # where a request names none; None: no limit
    takes_width: bool = True
    anywhere: bool = False  # a drafter by levels expands the most probable nodes of all depths


HEAP = Policy("heap", "the most probable prefixes, at most `tree_width` behind each token", _heap, anywhere=True)
EAGLE2 = Policy(
    "eagle2",
    "the most probable among the `tree_width` children of the `tree_width` best nodes of each depth",
    _eagle2,
    width=10,
)
BEAM = Policy("beam", "the `tree_width` most probable continuations of each depth's nodes", _beam, width=4)
CHAIN = Policy("chain", "the most probable token, one behind the other", _chain, width=1, takes_width=False)

POLICIES = {policy.name: policy for policy in (HEAP, EAGLE2, BEAM, CHAIN)}  # by name


@dataclass(frozen=True)
class TreePlan:
    """The tree that a round is to make."""

    budget: int  # most nodes
    policy: Policy = HEAP
    max_depth: int | None = None  # most tokens of a path
    width: int | None = None  # None: the policy's own

    @property
    def longest_path(self) -> int:
        """Most tokens of a path in a tree of this plan."""
        return self.budget if self.max_depth is None else min(self.budget, self.max_depth)

    @property
    def expanded(self) -> int:
        """Most nodes that a pass of a drafter by levels expands."""
        return self.width or self.policy.width or EXPANDED

    def grow(self, candidates: Candidates) -> DraftTree:
        """The tree. Raises ValueError for candidates that cannot be used."""
        return self.policy.grow(candidates, self.budget, self.max_depth, self.width)
