"""The draft tree: from a drafter's candidates to the tokens one target pass verifies.

`best_tree` is Algorithm 1 of DDTree (arXiv 2604.12989): the B most probable prefixes under the product of the drafter's
conditionals, which maximises the expected acceptance length of that surrogate (Propositions 1–3, whose proofs use no
more than that a prefix is no more probable than the one it extends). The heap, the masks and the walk are C++.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree_trt import _native
from ddtree_trt.runtime.candidates import Candidates, Marginals


@dataclass(frozen=True)
class DraftTree:
    """Draft nodes 1…n below the root (node 0, the bonus token), in the order in which the heap pops them: a prefix of
    that order is the tree of that size, so cutting a tree to a smaller budget is slicing it."""

    token_ids: NDArray[np.int32]  # [n]
    depths: NDArray[np.int32]  # [n], 1-based
    parents: NDArray[np.int32]  # [n + 1]; parents[0] is −1, the others index nodes 0…n
    log_weights: NDArray[np.float64]  # [n]: sum of log-probabilities of the prefix

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, budget: int) -> DraftTree:
        """The tree of at most `budget` nodes."""
        if budget >= len(self.token_ids):
            return self
        n = max(budget, 0)
        return DraftTree(self.token_ids[:n], self.depths[:n], self.parents[: n + 1], self.log_weights[:n])

    def only(self, kept: NDArray[np.bool_]) -> DraftTree:
        """The tree of the nodes that are kept, bool [n], which include every kept node's parent."""
        place = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)  # [1 + n]: a kept node's number
        parents = np.concatenate([self.parents[:1], place[self.parents[1:][kept]]])
        return DraftTree(self.token_ids[kept], self.depths[kept], parents, self.log_weights[kept])


@dataclass(frozen=True)
class TokenTree:
    """A tree with its root's token, ready for a target pass of T = 1 + n tokens in topological order."""

    token_ids: NDArray[np.int64]  # [T]
    parents: NDArray[np.int32]  # [T]
    depths: NDArray[np.int32]  # [T]; the root's is 0, so a node's position is past + depth

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def packed_mask(self) -> NDArray[np.int32]:
        """Ancestor-or-self bits, int32 [T, ceil(T/32)]: bit j mod 32 of word j/32 in row i."""
        return _native.packed_mask(self.parents)


def best_tree(
    candidates: Candidates, budget: int, *, max_depth: int | None = None, width: int | None = None
) -> DraftTree:
    """The tree of at most `budget` nodes, the root aside: the most probable prefixes of at most `max_depth` tokens,
    with at most `width` children of a node. The tree of a smaller budget is its beginning.

    Raises ValueError for candidates that cannot be used, a negative budget or depth, or a width of 0.
    """
    return DraftTree(*candidates.best_first(budget, max_depth, width))


def build_tree(log_probs: ArrayLike, token_ids: ArrayLike, budget: int) -> DraftTree:
    """The `budget` most probable prefixes of marginals as a tree, or as many as there are.

    `log_probs`: float32 [L, K], each row falling, of the candidates `token_ids`, int [L, K]. Raises ValueError for
    shapes that differ, a negative budget, or NaN.
    """
    return best_tree(Marginals(np.asarray(log_probs, np.float32), np.asarray(token_ids, np.int32)), budget)


def chain(token_ids: ArrayLike, log_probs: ArrayLike | None = None) -> DraftTree:
    """A tree without branches, tokens [n] from the root down. Without log_probs [n] the log-weights are 0."""
    ids = np.ascontiguousarray(token_ids, np.int32)
    weights = np.zeros(len(ids)) if log_probs is None else np.cumsum(log_probs, dtype=np.float64)
    return DraftTree(ids, np.arange(1, len(ids) + 1, dtype=np.int32), chain_parents(len(ids) + 1), weights)


def chain_parents(length: int) -> NDArray[np.int32]:
    """Parents [T] of a chain of T tokens."""
    return np.arange(-1, length - 1, dtype=np.int32)


def token_chain(token_ids: NDArray[np.int64]) -> TokenTree:
    """A causal sequence of tokens [T] as a tree without branches."""
    length = len(token_ids)
    return TokenTree(token_ids, chain_parents(length), np.arange(length, dtype=np.int32))


EMPTY = chain([])
_ROOT_DEPTHS = np.zeros(1, np.int32)


def compile_tree(root_token: int, tree: DraftTree) -> TokenTree:
    """The draft tree below the bonus token as its root."""
    if tree is EMPTY:
        return TokenTree(np.array([root_token], np.int64), EMPTY.parents, _ROOT_DEPTHS)
    size = len(tree.parents)
    token_ids, depths = np.empty(size, np.int64), np.empty(size, np.int32)
    token_ids[0], depths[0] = root_token, 0
    token_ids[1:], depths[1:] = tree.token_ids, tree.depths
    return TokenTree(token_ids, tree.parents, depths)


def descend(tree: DraftTree, choose: Callable[[int], int | None]) -> NDArray[np.int32]:
    """The accepted path [m], root first, as `_native.walk` gives it, for choices that depend on the path:
    `choose(node)` is called only at the nodes visited, in order, and ends the walk there by None."""
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(tree.parents[1:].tolist(), tree.token_ids.tolist(), strict=True), 1)
    }
    path = [0]
    while (token := choose(path[-1])) is not None and (child := children.get((path[-1], token))) is not None:
        path.append(child)
    return np.array(path, np.int32)
