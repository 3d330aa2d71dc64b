"""Ways to make a tree of a drafter's candidates: the best-first heap, EAGLE-2's tree (arXiv 2406.16858), a beam and a
chain. The trees of each nest: that of fewer nodes is the beginning of that of more."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ddtree_trt.runtime.candidates import NO_ROW, Bilinear, Candidates, Marginals
from ddtree_trt.runtime.tree import DraftTree, best_tree


def heap(candidates: Candidates, nodes: int, depth: int) -> DraftTree:
    """The most probable `nodes` nodes, at most `depth` deep."""
    return best_tree(candidates, nodes, max_depth=depth)


def chain(candidates: Candidates, nodes: int, depth: int) -> DraftTree:
    return best_tree(candidates, nodes, max_depth=depth, width=1)


def eagle2(candidates: Candidates, nodes: int, depth: int, width: int = 10) -> DraftTree:
    """At each depth the `width` most probable nodes get their `width` most probable children. Of all these the most
    probable are the tree; of equal ones the shallower, so that no node comes before its parent."""
    return _by_depth(candidates, nodes, depth, width, beam=False)


def beam(candidates: Candidates, nodes: int, depth: int, width: int = 4) -> DraftTree:
    """At each depth the `width` most probable children of the nodes of the depth above, by depth, then by weight."""
    return _by_depth(candidates, nodes, depth, width, beam=True)


def _by_depth(candidates: Candidates, nodes: int, depth: int, width: int, *, beam: bool) -> DraftTree:
    candidates.best_first(0)  # raises ValueError for candidates that cannot be used
    weights, tokens, parents, depths = [0.0], [0], [-1], [0]
    above = [] if candidates.empty else [(0, 0)]  # (node, row of its children)
    while above and depths[-1] < depth and not (beam and len(weights) > nodes):
        found = candidates.child_log_probs([row for _, row in above])
        children = []
        for i, (node, _) in enumerate(above):
            for log_prob, token, row in zip(*(values[i, :width].tolist() for values in found), strict=True):
                if log_prob > -np.inf:  # rounding may leave one just above 0: a child would come before its parent
                    children.append((weights[node] + min(log_prob, 0.0), token, node, row))
        children.sort(key=lambda child: -child[0])
        below, level = [], depths[-1] + 1
        for weight, token, node, row in children[: width if beam else None]:
            weights.append(weight)
            tokens.append(token)
            parents.append(node)
            depths.append(level)
            below.append((len(weights) - 1, row))
        above = [(node, row) for node, row in below[:width] if row != NO_ROW]
    order = list(range(1, len(weights)))
    if not beam:
        order.sort(key=lambda node: -weights[node])
    order = order[:nodes]
    place = {0: 0, **{node: i for i, node in enumerate(order, 1)}}
    return DraftTree(
        np.array([tokens[n] for n in order], np.int32),
        np.array([depths[n] for n in order], np.int32),
        np.array([-1, *(place[parents[n]] for n in order)], np.int32),
        np.array([weights[n] for n in order], np.float64),
    )


HEAP, EAGLE2, BEAM, CHAIN = "heap", "eagle2", "beam", "chain"
POLICIES: Mapping[str, Callable[..., DraftTree]] = {HEAP: heap, EAGLE2: eagle2, BEAM: beam, CHAIN: chain}


def without_conditions(candidates: Candidates) -> Marginals | None:
    """The candidates as the drafter states them before it looks at the token above; None where they are not stated."""
    if not isinstance(candidates, Bilinear):
        return None
    top = candidates.unary.max(axis=1, keepdims=True)
    total = top + np.log(np.exp(candidates.unary - top).sum(axis=1, keepdims=True))
    return Marginals((candidates.unary - total).astype(np.float32), candidates.token_ids)
