"""Taking out of a tree what its sequence's constraint does not allow, before the tree is verified."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime.structured.matcher import Matcher
from ddtree_trt.runtime.tree import DraftTree

_SPARE_SHARE, _MOST_SPARE = 3, 192  # per node, and in all


def with_spare(nodes: int) -> int:
    """How many nodes to draft so that about `nodes` are allowed: most of what a drafter without knowledge of the
    constraint proposes is not."""
    return nodes + min(_SPARE_SHARE * nodes, _MOST_SPARE)


def allowed_part(tree: DraftTree, matcher: Matcher, behind: Sequence[int] = ()) -> DraftTree:
    """The nodes of the tree whose paths the constraint allows, in their order. `behind`: tokens between the output and
    the tree's root.

    A beginning of the result is the allowed part of a beginning of the tree, so a budget may cut it.
    """
    parents, tokens = tree.parents.tolist(), tree.token_ids.tolist()
    allowed: list[bool | None] = [True] + [None] * len(tree)  # None: not yet judged
    prefix = list(behind)
    for leaf in range(len(tree), 0, -1):
        if allowed[leaf] is not None:
            continue
        path, node = [], leaf
        while node > 0 and allowed[node] is not False:
            path.append(node)
            node = parents[node]
        path.reverse()
        # Behind a node that is not allowed, none is.
        length = 0 if node else matcher.allowed_length(prefix + [tokens[n - 1] for n in path]) - len(prefix)
        for place, each in enumerate(path):
            allowed[each] = place < length
    kept = np.array(allowed[1:], bool)
    return tree if kept.all() else _kept(tree, kept)


def _kept(tree: DraftTree, kept: NDArray[np.bool_]) -> DraftTree:
    """The tree of the nodes that are kept, bool [n], which include every kept node's parent."""
    place = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)  # [1 + n]: a kept node's number
    parents = np.concatenate([tree.parents[:1], place[tree.parents[1:][kept]]])
    return DraftTree(tree.token_ids[kept], tree.depths[kept], parents, tree.log_weights[kept])
