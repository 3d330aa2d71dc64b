"""Ways to make a tree of candidates, at most so many nodes large and so many tokens deep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime.candidates import Bilinear, Candidates, Marginals
from ddtree_trt.runtime.tree import DraftTree, best_tree

EAGLE_WIDTH = 10  # nodes that EAGLE-2 expands per depth, and children of each


@dataclass(frozen=True)
class Policy:
    """A way to make trees; `widths` are those it is tried with, of which the best counts."""

    name: str
    make: Callable[[Candidates, int, int, int], DraftTree]  # (candidates, most nodes, deepest, width)
    widths: Callable[[int], tuple[int, ...]]  # by the most nodes


def _heap(candidates: Candidates, nodes: int, depth: int, width: int) -> DraftTree:
    return best_tree(candidates, nodes, max_depth=depth)


def _chain(candidates: Candidates, nodes: int, depth: int, width: int) -> DraftTree:
    return best_tree(candidates, nodes, max_depth=depth, width=1)


def _eagle2(candidates: Candidates, nodes: int, depth: int, width: int) -> DraftTree:
    return _layers(candidates, nodes, depth, width, None)


def _beam(candidates: Candidates, nodes: int, depth: int, width: int) -> DraftTree:
    """`width` nodes at every depth, as deep as `nodes` allows."""
    return _layers(candidates, nodes, min(depth, max(nodes // width, 1)), width, width)


def _layers(candidates: Candidates, nodes: int, depth: int, width: int, keep: int | None) -> DraftTree:
    """Expand the `width` most probable nodes of every depth by their `width` most probable children, of which the
    `keep` best remain (None: all), then keep the `nodes` most probable, of equal ones the shallower."""
    frontier, weights, rows = np.zeros(1, np.int64), np.zeros(1), np.zeros(1, np.int32)
    parents, tokens, depths, totals = [np.array([-1])], [np.array([-1])], [np.zeros(1, np.int64)], [np.zeros(1)]
    count = 1
    for level in range(depth):
        able = rows >= 0
        if candidates.empty or not able.any():
            break
        children = candidates.child_log_probs(rows[able])
        log_probs, token_ids = children.log_probs[:, :width], children.token_ids[:, :width]
        total = (weights[able, None] + log_probs.astype(np.float64)).ravel()
        best = _falling(total, keep)
        made = np.sort(best)
        parents.append(np.repeat(frontier[able], log_probs.shape[1])[made])
        tokens.append(token_ids.ravel()[made])
        totals.append(total[made])
        depths.append(np.full(len(made), level + 1))
        expanded = np.sort(best[:width])
        frontier, weights = count + np.searchsorted(made, expanded), total[expanded]
        rows = children.rows[:, :width].ravel()[expanded]
        count += len(made)
    order = np.lexsort((np.concatenate(depths), -np.concatenate(totals)))  # the root first: its weight is 0
    joined = np.concatenate(parents), np.concatenate(tokens), np.concatenate(depths), np.concatenate(totals)
    return _kept(*joined, order[: nodes + 1])


def _falling(weights: NDArray[np.float64], count: int | None) -> NDArray[np.int64]:
    """The places of the `count` largest weights, or of all, the largest first."""
    if count is None or count >= len(weights):
        return np.argsort(-weights, kind="stable")
    places = np.sort(np.argpartition(-weights, count - 1)[:count])
    return places[np.argsort(-weights[places], kind="stable")]


def _kept(
    parents: NDArray[np.int64],
    tokens: NDArray[np.int64],
    depths: NDArray[np.int64],
    totals: NDArray[np.float64],
    order: NDArray[np.int64],
) -> DraftTree:
    """The tree of the nodes `order`, the root first and every node behind its parent, without impossible ones."""
    order = order[np.isfinite(totals[order])]
    place = np.full(len(totals), -1, np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    nodes = order[1:]
    above = np.concatenate([[-1], place[parents[nodes]]]).astype(np.int32)
    return DraftTree(tokens[nodes].astype(np.int32), depths[nodes].astype(np.int32), above, totals[nodes])


def _powers(nodes: int) -> tuple[int, ...]:
    return tuple(1 << i for i in range(nodes.bit_length()))


HEAP = Policy("heap", _heap, lambda nodes: (0,))
EAGLE2 = Policy("eagle2", _eagle2, lambda nodes: (EAGLE_WIDTH,))
BEAM = Policy("beam", _beam, _powers)
CHAIN = Policy("chain", _chain, lambda nodes: (1,))
POLICIES = (HEAP, EAGLE2, BEAM, CHAIN)


def without_conditions(candidates: Candidates) -> Marginals | None:
    """The candidates as the drafter states them before it looks at the token above; None where they are not stated."""
    if not isinstance(candidates, Bilinear):
        return None
    top = candidates.unary.max(axis=1, keepdims=True)
    total = top + np.log(np.exp(candidates.unary - top).sum(axis=1, keepdims=True))
    return Marginals((candidates.unary - total).astype(np.float32), candidates.token_ids)
