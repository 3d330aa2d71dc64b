"""Tree budgets: the number of draft nodes that a round verifies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime.tree import DraftTree


@dataclass(frozen=True)
class Decision:
    """The budget of a round, and the estimates it was chosen by."""

    nodes: int
    expected_tokens: float  # 1 + Σ q̂ over the chosen nodes
    expected_s: float  # C_draft + C_verify; of a pass with other slots, this one's share
    single_token_s: float  # a round without drafting, likewise
    drafted: bool = True
    probe: bool = False  # drafted only to see whether drafting pays again

    @property
    def expected_gain(self) -> float:
        """Expected tokens per second, relative to a round without drafting."""
        return self.expected_tokens * self.single_token_s / self.expected_s


class Budget(Protocol):
    """Chooses the tree size of every round of one sequence."""

    levels: int | None  # of the next draft, of a drafter that drafts level by level; None for as many as nodes
    last: Decision | None  # of the latest round; None for a fixed budget

    def ceiling(self, past: int, left: int) -> int:
        """Most nodes worth drafting for at `past` committed tokens, where at most `left` ≥ 1 tokens may still come; 0
        skips the drafter this round."""

    def choose(self, tree: DraftTree, past: int) -> int:
        """How many nodes of the tree, in pop order, to verify."""

    def observe(self, tree: DraftTree, path: NDArray[np.int32], next_token: int, *, ends: bool = False) -> None:
        """Learn from a verified tree, the accepted path [m], root first, and the target's choice at its end. `ends`:
        the output ends with the path, which its end may have cut: the round is booked, but is no evidence of the
        draft's quality."""


class FixedBudget:
    """The same budget every round."""

    def __init__(self, nodes: int, levels: int | None = None) -> None:
        self.nodes = nodes
        self.levels = levels
        self.last: Decision | None = None

    def ceiling(self, past: int, left: int) -> int:
        return self.nodes

    def choose(self, tree: DraftTree, past: int) -> int:
        return self.nodes

    def observe(self, tree: DraftTree, path: NDArray[np.int32], next_token: int, *, ends: bool = False) -> None:
        pass
