"""Trees grown depth by depth: a beam of fixed width, and EAGLE-2's expansion and reranking (arXiv 2406.16858).

Both are what the best-first heap is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime.candidates import NO_ROW, Candidates
from ddtree_trt.runtime.tree import DraftTree


@dataclass(frozen=True)
class _Level:
    """Nodes of one depth by falling weight; of equal ones those of an earlier parent, then of a lower rank, first."""

    log_weights: NDArray[np.float64]  # [n]
    token_ids: NDArray[np.int32]  # [n]
    parents: NDArray[np.int32]  # [n]: places in the level above
    rows: NDArray[np.int32]  # [n]: of their children, or NO_ROW

    def __len__(self) -> int:
        return len(self.rows)


_ROOT = _Level(np.zeros(1), np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))


def beam(candidates: Candidates, budget: int, max_depth: int | None, width: int) -> DraftTree:
    """At each depth the `width` most probable children of the nodes of the depth above. The nodes are ordered by depth,
    then by falling weight, so that a budget ends the tree within a depth."""
    levels = _levels(candidates, max_depth, expand=width, children=width, keep=width, budget=budget)
    return _tree(levels, budget)


def eagle2(candidates: Candidates, budget: int, max_depth: int | None, width: int) -> DraftTree:
    """At each depth the `width` most probable nodes get their `width` most probable children. Of all these nodes the
    most probable are the tree; of equal ones the shallower. So a node never comes before its parent."""
    levels = _levels(candidates, max_depth, expand=width, children=width)
    return _tree(levels, budget, rerank=True)


def _levels(
    candidates: Candidates,
    max_depth: int | None,
    *,
    expand: int,
    children: int,
    keep: int | None = None,
    budget: int | None = None,
) -> list[_Level]:
    """The levels below the root: the children of the `expand` first nodes of the level above, `keep` of them, until the
    levels have `budget` nodes."""
    candidates.best_first(0)  # raises ValueError for candidates that cannot be used
    levels: list[_Level] = []
    above, nodes = _ROOT, 0
    while len(above) and not candidates.empty and len(levels) != max_depth and (budget is None or nodes < budget):
        above = _below(candidates, above, expand, children, keep)
        levels.append(above)
        nodes += len(above)
    return levels


def _below(candidates: Candidates, above: _Level, expand: int, children: int, keep: int | None) -> _Level:
    expanded = np.flatnonzero(above.rows[:expand] != NO_ROW)
    found = candidates.child_log_probs(above.rows[expanded])
    log_probs, token_ids, rows = found.log_probs[:, :children], found.token_ids[:, :children], found.rows[:, :children]
    steps = np.minimum(log_probs, 0, dtype=np.float64)  # rounding may leave one just above: a child would come first
    weights = (above.log_weights[expanded, None] + steps).ravel()
    order = np.argsort(-weights, kind="stable")[:keep]
    order = order[weights[order] > -np.inf]
    parents = np.repeat(expanded, log_probs.shape[1])[order].astype(np.int32)
    return _Level(weights[order], token_ids.ravel()[order], parents, rows.ravel()[order])


def _tree(levels: list[_Level], budget: int, *, rerank: bool = False) -> DraftTree:
    """The first `budget` nodes of the levels, by depth or, to `rerank`, by falling weight."""
    sizes = [len(level) for level in levels]
    starts = np.cumsum([1, *sizes])  # index of each level's first node; the root's is 0
    log_weights = np.concatenate([np.zeros(0), *(level.log_weights for level in levels)])
    token_ids = np.concatenate([np.zeros(0, np.int32), *(level.token_ids for level in levels)])
    depths = np.repeat(np.arange(1, len(levels) + 1, dtype=np.int32), sizes)
    above = [0, *starts[:-1]]
    parents = np.concatenate([[0], *(level.parents + above[d] for d, level in enumerate(levels))])
    order = np.argsort(-log_weights, kind="stable")[:budget] if rerank else np.arange(min(len(log_weights), budget))
    place = np.zeros(1 + len(log_weights), np.int32)
    place[1 + order] = np.arange(1, len(order) + 1, dtype=np.int32)
    moved = np.concatenate([[-1], place[parents[1 + order]]]).astype(np.int32)
    return DraftTree(token_ids[order], depths[order], moved, log_weights[order])
