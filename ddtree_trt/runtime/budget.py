"""How many draft nodes a round verifies."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime.tree import DraftTree


class Budget(Protocol):
    """Chooses the tree size of every round of one sequence."""

    def ceiling(self, past: int) -> int:
        """Most nodes worth drafting for at `past` committed tokens; 0 skips the drafter this round."""

    def choose(self, tree: DraftTree, past: int) -> int:
        """How many nodes of the tree, in pop order, to verify."""

    def observe(self, tree: DraftTree, path: NDArray[np.int32]) -> None:
        """Learn from a verified tree and the accepted path [m], root first."""


class FixedBudget:
    """The same budget every round."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def ceiling(self, past: int) -> int:
        return self.nodes

    def choose(self, tree: DraftTree, past: int) -> int:
        return self.nodes

    def observe(self, tree: DraftTree, path: NDArray[np.int32]) -> None:
        pass
