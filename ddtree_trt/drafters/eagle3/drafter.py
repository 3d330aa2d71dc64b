"""The EAGLE-3 drafter, which is the same class on all backends: it drafts a tree level by level.

Its cache has a row for every committed token: row i is made of the tapped target states of token i and of the token
behind it. So the last row is made when that token, the bonus token, is known. Behind these rows a draft writes those of
the nodes it expands, each made of its token and of its parent's output, and forgets them when it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.drafters.kind import EXPANDED, most_expanded
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.candidates import LinkedRows
from ddtree_trt.runtime.engines.base import Draft, DraftRequest
from ddtree_trt.runtime.engines.drafters import Drafter
from ddtree_trt.runtime.engines.passes import SlotLengths


@dataclass(frozen=True)
class Level:
    """The results at R rows of a pass."""

    outputs: Sequence[Any]  # [R]: a vector [H] of the backend each, in memory that no later pass overwrites
    log_probs: NDArray[np.float32]  # [R, K], falling
    token_ids: NDArray[np.int32]  # [R, K]: the target's ids


@dataclass(frozen=True)
class Nodes:
    """The nodes of a draft whose rows follow the committed ones. Those before `first` are in the cache already."""

    token_ids: NDArray[np.int64]  # [m]
    depths: NDArray[np.int64]  # [m]: 0 for children of the bonus token, so that a position is past + depth
    sees: NDArray[np.bool_]  # [m, m]: whether a row sees another: its ancestors and itself
    features: Sequence[Any]  # [m]: the output [H] of each one's parent
    first: int


class EagleNetwork(Protocol):
    """The passes of an EAGLE-3 drafter over one slot at a time."""

    @property
    def cache(self) -> SlotLengths:
        """The number of committed rows of each slot."""

    def join(self, pieces: Sequence[Any]) -> Any:
        """Tapped states [m, M·H] of all pieces one after another, in memory of their own."""

    def absorb(self, slot: int, token_ids: NDArray[np.int64], states: Any, top_k: int) -> Level:
        """Write and commit rows of tokens [m] with the tapped states [m, M·H] of the tokens before them; the results
        are those of the last row."""

    def expand(self, slot: int, nodes: Nodes, top_k: int) -> Level:
        """Write the rows of nodes from `nodes.first` on behind the committed rows and the nodes before; their results.
        Nothing is committed."""


@dataclass
class _Context:
    """A slot: its known tokens, of which the cache has rows, and the tapped states that are not in the cache yet."""

    tokens: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)  # of each row in the cache the token that it was made with
    states: Any = None  # [m, M·H]: of the tokens without a row

    def check_row(self, token: int) -> None:
        """Raises EngineError where the last row was made with another token than the one that follows now."""
        if len(self.behind) == len(self.tokens) and self.behind and self.behind[-1] != token:
            raise EngineError(f"the drafter's last row was made with token {self.behind[-1]}, and {token} follows")


class EagleDrafter(Drafter):
    """EAGLE-3 over a backend's network."""

    def __init__(self, network: EagleNetwork, chunk: int, most_nodes: int, width: int = EXPANDED) -> None:
        """`chunk`: most rows of one pass; `most_nodes`: most nodes that a draft expands, `width`: and one pass."""
        self._network = network
        self._chunk = chunk
        self._most_nodes = most_nodes
        self._width = width
        self._contexts = [_Context() for _ in range(network.cache.slots)]

    def context_length(self, slot: int) -> int:
        return len(self._contexts[slot].tokens)

    def append_context(self, slot: int, token_ids: NDArray[np.int64], states: Any) -> None:
        """Passes of a long prompt run here, so that few states wait."""
        context = self._contexts[slot]
        context.check_row(int(token_ids[0]))
        context.tokens += token_ids.tolist()
        context.states = self._network.join([states] if context.states is None else [context.states, states])
        if len(context.states) > self._chunk:
            self._absorb(slot, context, context.tokens[len(context.behind) + 1 :], 1)

    def truncate(self, slot: int, length: int) -> None:
        context = self._contexts[slot]
        del context.tokens[length:]
        del context.behind[length:]
        self._network.cache.truncate(slot, len(context.behind))
        waiting = len(context.tokens) - len(context.behind)
        context.states = context.states[:waiting] if waiting else None

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A pass for every level of each slot's tree but the last. Raises EngineError where a request asks for more
        nodes to be expanded than the drafter has rows for."""
        return [self._draft(request) for request in requests]

    def warm_up(self, slot: int, budget: int) -> None:
        """Does nothing: no pass is captured."""

    def _absorb(self, slot: int, context: _Context, tokens: list[int], top_k: int) -> Level:
        """Make the rows of waiting states with the tokens [m] behind theirs; the results of the last one."""
        level: Level | None = None
        for start in range(0, len(tokens), self._chunk):
            piece = np.array(tokens[start : start + self._chunk], np.int64)
            level = self._network.absorb(slot, piece, context.states[start : start + len(piece)], top_k)
            context.behind += piece.tolist()
        assert level is not None, "there are rows to make"
        context.states = context.states[len(tokens) :] if len(tokens) < len(context.states) else None
        return level

    def _draft(self, request: DraftRequest) -> Draft:
        slot, context = request.slot, self._contexts[request.slot]
        if context.states is None:
            raise EngineError(f"slot {slot} has no new target states to draft from")
        following = [*context.tokens[len(context.behind) + 1 :], request.bonus_token]
        if (wanted := most_expanded(self._width, request.length)) > self._most_nodes:
            raise EngineError(
                f"a draft of {request.length} levels with {self._width} nodes expanded in each may need {wanted} "
                f"rows, and the drafter has {self._most_nodes}"
            )
        growth = _Growth(self._absorb(slot, context, following, request.top_k))
        for _ in range(1, request.length):
            nodes = growth.expand(self._width)
            if nodes is None:
                break
            growth.add(self._network.expand(slot, nodes, request.top_k))
        return Draft(growth.rows())


class _Growth:
    """A draft in the making: its rows of candidates, and the nodes that were expanded."""

    def __init__(self, root: Level) -> None:
        self.token_ids: list[int] = []  # of expanded nodes, in the order of their rows
        self._depths: list[int] = []
        self._paths: list[list[int]] = []  # of each node its ancestors among them, and itself
        self._features: list[Any] = []
        self._outputs: list[Any] = list(root.outputs)  # of every row of candidates
        self._log_probs, self._ids = [root.log_probs], [root.token_ids]  # [R, K] in all
        self._weights = [np.zeros(1)]  # [R] in all: log-weight of the node whose children a row has
        self._next_rows = np.full(root.log_probs.shape, -1, np.int32)  # [R, K]
        self._latest = 0  # the first row of the last level

    def expand(self, count: int) -> Nodes | None:
        """Choose the `count` most probable candidates of the last level; their nodes and all before. None where there
        is no candidate."""
        weights = np.concatenate(self._log_probs).astype(np.float64) + np.concatenate(self._weights)[:, None]
        weights[: self._latest] = -np.inf
        order = np.argsort(-weights, axis=None, kind="stable")[:count]
        order = order[np.isfinite(weights.flat[order])]
        if not len(order):
            return None
        first, ids = len(self.token_ids), np.concatenate(self._ids)
        for node, place in enumerate(order.tolist(), start=first):
            row, column = divmod(place, ids.shape[1])
            self._next_rows[row, column] = 1 + node  # the root's row is row 0
            self.token_ids.append(int(ids[row, column]))
            self._depths.append(self._depths[row - 1] + 1 if row else 0)
            self._paths.append([*(self._paths[row - 1] if row else []), node])
            self._features.append(self._outputs[row])
        self._weights.append(weights.flat[order])
        size = len(self.token_ids)
        sees = np.zeros((size, size), bool)
        for node, path in enumerate(self._paths):
            sees[node, path] = True
        return Nodes(np.array(self.token_ids), np.array(self._depths), sees, list(self._features), first)

    def add(self, level: Level) -> None:
        """Take the results of the nodes of the latest `expand`."""
        self._latest = len(self._next_rows)
        self._outputs += level.outputs
        self._log_probs.append(level.log_probs)
        self._ids.append(level.token_ids)
        self._next_rows = np.concatenate([self._next_rows, np.full(level.log_probs.shape, -1, np.int32)])

    def rows(self) -> LinkedRows:
        """All rows of candidates."""
        return LinkedRows(np.concatenate(self._log_probs), np.concatenate(self._ids), self._next_rows)
