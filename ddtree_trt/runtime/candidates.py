"""The candidates a drafter states for the tokens behind the bonus token, as rows: the children of a node.

A row has K candidates, the most probable first, with log-probabilities given the path above them. Row 0 is the root's.
A candidate's children are the next position's row (`Marginals`), a row it names (`LinkedRows`), or a row of its own,
computed from a bilinear form (`Bilinear`). The best-first heap over a record runs in C++ (`best_first`); other ways to
make a tree ask for rows by their index (`child_log_probs`).
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree_trt import _native

_floats, _ints = (partial(np.ascontiguousarray, dtype=each) for each in (np.float32, np.int32))

NO_ROW = -1  # in place of a row's index, of a candidate without children

# token_ids [n] int32, depths [n] int32, parents [n + 1] int32 and log_weights [n] float64 of a tree
Nodes: TypeAlias = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]]


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

    def best_first(self, budget: int, max_depth: int | None = None, width: int | None = None) -> Nodes:
        """The `budget` most probable prefixes of at most `max_depth` tokens, each among the `width` first of its row,
        as the heap pops them. Raises ValueError for shapes that differ, a row that does not fall, NaN or +inf."""
        return _native.build_tree(_floats(self.log_probs), _ints(self.token_ids), budget, max_depth, width)

    def child_log_probs(self, rows: ArrayLike) -> Children:
        """The rows of indices [F]."""
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

    def best_first(self, budget: int, max_depth: int | None = None, width: int | None = None) -> Nodes:
        """As `Marginals.best_first`. Raises ValueError also for a link to the same row, one before it, or none."""
        arrays = _floats(self.log_probs), _ints(self.token_ids), _ints(self.next_rows)
        return _native.build_linked_tree(*arrays, budget, max_depth, width)

    def child_log_probs(self, rows: ArrayLike) -> Children:
        """The rows of indices [F]."""
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

    def best_first(self, budget: int, max_depth: int | None = None, width: int | None = None) -> Nodes:
        """As `Marginals.best_first`; the conditionals of a candidate are computed when its children are wanted."""
        return _native.build_bilinear_tree(*self._arrays(), budget, max_depth, width)

    def child_log_probs(self, rows: ArrayLike) -> Children:
        """The rows of indices [F]. Raises ValueError for arrays that `best_first` would refuse."""
        return Children(*_native.bilinear_rows(*self._arrays(), _ints(rows)))

    def _arrays(self) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
        return _floats(self.unary), _ints(self.token_ids), _floats(self.left), _floats(self.right)


Candidates: TypeAlias = Marginals | LinkedRows | Bilinear
