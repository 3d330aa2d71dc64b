"""A drafter's candidates for the tokens behind the bonus token, and the draft tree that one target pass verifies.

Candidates are rows: the children of a node, the K most probable ones first, with log-probabilities given the path above
them. Row 0 is the root's. A candidate's children are the next position's row (`Marginals`), a row it names
(`LinkedRows`), or a row of its own, computed from a bilinear form (`Bilinear`). Where `best_first` does not make the
tree, rows are asked for by their index (`child_log_probs`).

Candidates' `best_first` is Algorithm 1 of DDTree (arXiv 2604.12989): the B most probable prefixes under the product of
the drafter's conditionals, which maximises the expected acceptance length of that surrogate (Propositions 1–3, whose
proofs use no more than that a prefix is no more probable than the one it extends). Heap, masks and walk are C++.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree_trt import _native

_floats, _ints = (partial(np.ascontiguousarray, dtype=each) for each in (np.float32, np.int32))

NO_ROW = -1  # in place of a row's index, of a candidate without children


class Children(NamedTuple):
    """F rows of K candidates."""

    log_probs: NDArray[np.float32]  # [F, K], falling
    token_ids: NDArray[np.int32]  # [F, K]
    rows: NDArray[np.int32]  # [F, K]: the row of each candidate's own children, or NO_ROW


@dataclass(frozen=True)
class Marginals:
    """Candidates that do not depend on the tokens before them: the children of every node at depth d are row d."""

    log_probs: NDArray[np.float32]  # [L, K], falling
    token_ids: NDArray[np.int32]  # [L, K]

    def best_first(self, budget: int, max_depth: int | None = None, width: int | None = None) -> DraftTree:
        """The `budget` most probable prefixes of at most `max_depth` tokens, each among the `width` first of its row,
        as the heap pops them. Raises ValueError for shapes that differ, a row that does not fall, NaN or +inf."""
        return DraftTree(*_native.build_tree(_floats(self.log_probs), _ints(self.token_ids), budget, max_depth, width))

    def child_log_probs(self, rows: ArrayLike) -> Children:
        wanted = np.asarray(rows, np.int32)
        following = np.where(wanted + 1 < len(self.log_probs), wanted + 1, NO_ROW).astype(np.int32)
        width = self.log_probs.shape[1]
        return Children(self.log_probs[wanted], self.token_ids[wanted], np.repeat(following[:, None], width, 1))


@dataclass(frozen=True)
class LinkedRows:
    """Candidates whose children are rows they name: those of the nodes that a drafter expanded."""

    log_probs: NDArray[np.float32]  # [R, K], falling
    token_ids: NDArray[np.int32]  # [R, K]
    next_rows: NDArray[np.int32]  # [R, K]: a later row, or NO_ROW

    def best_first(self, budget: int, max_depth: int | None = None, width: int | None = None) -> DraftTree:
        """As `Marginals.best_first`. Raises ValueError also for a link to the same row, one before it, or none."""
        arrays = _floats(self.log_probs), _ints(self.token_ids), _ints(self.next_rows)
        return DraftTree(*_native.build_linked_tree(*arrays, budget, max_depth, width))

    def child_log_probs(self, rows: ArrayLike) -> Children:
        wanted = np.asarray(rows, np.int32)
        return Children(self.log_probs[wanted], self.token_ids[wanted], self.next_rows[wanted])


@dataclass(frozen=True)
class Bilinear:
    """Candidates that depend on the token before them: candidate b of position t has, after candidate a of position
    t − 1, the probability softmax over b of unary[t, b] + ⟨left[t, a], right[t, b]⟩.

    At t = 0 the token before is the bonus token: left[0, 0] is the only entry of left[0] that counts. Of equal
    candidates the one with the lower index comes first.
    """

    unary: NDArray[np.float32]  # [L, C], falling
    token_ids: NDArray[np.int32]  # [L, C]
    left: NDArray[np.float32]  # [L, C, r]; left[t, a] belongs to candidate a of position t − 1
    right: NDArray[np.float32]  # [L, C, r]

    def best_first(self, budget: int, max_depth: int | None = None, width: int | None = None) -> DraftTree:
        """As `Marginals.best_first`; the conditionals of a candidate are computed when its children are wanted."""
        return DraftTree(*_native.build_bilinear_tree(*self._arrays(), budget, max_depth, width))

    def child_log_probs(self, rows: ArrayLike) -> Children:
        """The rows of indices [F]. Raises ValueError for arrays that `best_first` would refuse."""
        return Children(*_native.bilinear_rows(*self._arrays(), _ints(rows)))

    def _arrays(self) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
        return _floats(self.unary), _ints(self.token_ids), _floats(self.left), _floats(self.right)


Candidates: TypeAlias = Marginals | LinkedRows | Bilinear


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


def build_tree(log_probs: ArrayLike, token_ids: ArrayLike, budget: int) -> DraftTree:
    """The `budget` most probable prefixes of marginals as a tree, or as many as there are.

    `log_probs`: float32 [L, K], each row falling, of the candidates `token_ids`, int [L, K]. Raises ValueError for
    shapes that differ, a negative budget, or NaN.
    """
    return Marginals(np.asarray(log_probs, np.float32), np.asarray(token_ids, np.int32)).best_first(budget)


def chain(token_ids: ArrayLike) -> DraftTree:
    """A tree without branches, tokens [n] from the root down, all of log-weight 0."""
    ids = np.ascontiguousarray(token_ids, np.int32)
    return DraftTree(ids, np.arange(1, len(ids) + 1, dtype=np.int32), chain_parents(len(ids) + 1), np.zeros(len(ids)))


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
