"""Trees of drafts, in plain Python: chains, the most probable prefixes, and EAGLE-2's rule."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """Drafts in an order in which parents come first; node 0 is the bonus token, draft i is node i + 1."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]


EMPTY = Tree([], [], [])
Ranked = tuple[list[float], list[int]]
"""Log-probabilities, falling, and the tokens that have them."""
Children = Callable[[int, int, int], Ranked]
"""From (node, its token, its depth) to the tokens that may follow, none at the last depth; the root's token is -1."""
Expand = Callable[[list[tuple[int, int]]], list[Ranked]]
"""From nodes (parent node, token), all at once, to what may follow each; they are numbered in the order asked for."""


def chain(log_probabilities: Tensor) -> Tree:
    """The most probable token of every draft position [L, V]."""
    tokens = log_probabilities.argmax(-1).tolist()
    return Tree(tokens, list(range(len(tokens))), list(range(1, len(tokens) + 1)))


def best_first(log_probabilities: Tensor, budget: int) -> Tree:
    """The `budget` most probable prefixes when the draft positions [L, V] are independent."""
    values, indices = log_probabilities.topk(min(budget, log_probabilities.shape[1]), -1)
    scores, ranked = values.tolist(), indices.tolist()
    rows: list[Ranked] = [*zip(scores, ranked, strict=True), ([], [])]
    return best_prefixes(lambda node, token, depth: rows[depth], budget)


def best_prefixes(children: Children, budget: int) -> Tree:
    """The `budget` most probable prefixes when a token's probability depends on the prefix before it.

    A popped node offers its next-ranked sibling and its best child; both are less probable than itself, so nodes leave
    the heap in order of probability.
    """
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    rows = [children(0, -1, 0)]  # the children of every node, the root first
    heap = [(-rows[0][0][0], 0, 0, 0)]  # minus log-probability, parent, the parent's depth, rank
    while heap and len(tokens) < budget:
        cost, parent, depth, rank = heapq.heappop(heap)
        scores, ranked = rows[parent]
        tokens.append(ranked[rank])
        parents.append(parent)
        depths.append(depth + 1)
        rows.append(children(len(tokens), ranked[rank], depth + 1))
        if rank + 1 < len(ranked):
            heapq.heappush(heap, (cost + scores[rank] - scores[rank + 1], parent, depth, rank + 1))
        if rows[-1][0]:
            heapq.heappush(heap, (cost - rows[-1][0][0], len(tokens), depth + 1, 0))
    return Tree(tokens, parents, depths)


def grow(expand: Expand, budget: int, width: int, max_depth: int, *, by_depth: bool) -> Tree:
    """A tree of `budget` drafts over an autoregressive drafter, which expands up to `width` nodes at once.

    by_depth: EAGLE-2's rule, the `width` most probable nodes of the newest depth are expanded, so every depth costs one
    pass. Otherwise it is the `width` most probable ones among the best `budget` nodes that were not expanded yet, until
    there are none: what is kept are then the most probable prefixes there are. The best `budget` of all nodes are kept,
    ties to the shallower; ancestors are at least as probable and shallower, so they are kept as well.
    """
    nodes = [_Node(token=-1, parent=0, depth=0, score=0.0)]
    rows: dict[int, int] = {}  # node → its number in the expansions
    waiting, kept = [0], list[int]()
    while waiting:
        found = expand([(rows.get(nodes[node].parent, -1), nodes[node].token) for node in waiting])
        rows |= {node: len(rows) + place for place, node in enumerate(waiting)}
        first = len(nodes)
        for parent, (values, ids) in zip(waiting, found, strict=True):
            above = nodes[parent]
            nodes += [
                _Node(token, parent, above.depth + 1, above.score + value)
                for value, token in zip(values, ids, strict=True)
            ]
        newest = range(first, len(nodes))
        kept = _best(nodes, [*kept, *newest], budget)  # what is not among the best now never will be
        ready = [node for node in (newest if by_depth else kept) if node not in rows and nodes[node].depth < max_depth]
        waiting = _best(nodes, ready, width)
    place = {0: 0} | {node: number for number, node in enumerate(kept, 1)}
    return Tree(
        [nodes[node].token for node in kept],
        [place[nodes[node].parent] for node in kept],
        [nodes[node].depth for node in kept],
    )


@dataclass(frozen=True)
class _Node:
    token: int
    parent: int
    depth: int
    score: float  # logarithm of the product of the probabilities on its path


def _best(nodes: list[_Node], among: Iterable[int], count: int) -> list[int]:
    """The most probable of some nodes, in order; ties to the shallower, then to the earlier."""
    return heapq.nsmallest(count, among, key=lambda node: (-nodes[node].score, nodes[node].depth, node))
