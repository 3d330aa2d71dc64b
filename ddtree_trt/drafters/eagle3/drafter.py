"""The EAGLE-3 drafter, which is the same class on all backends: it drafts a tree level by level.

Its cache has a row for every committed token: row i is made of the tapped target states of token i and of the token
behind it. So the last row is made when that token, the bonus token, is known. Behind these rows a draft writes those of
the nodes it expands, each made of its token and of its parent's output, and forgets them when it is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.drafters.kind import EXPANDED
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, VerifyRequest
from ddtree_trt.runtime.engines.drafters import Cached, Drafter, split
from ddtree_trt.runtime.tree import LinkedRows, TokenTree, token_chain


@dataclass(frozen=True)
class NewRows(VerifyRequest):
    """Rows of a slot behind its committed ones, the bonus token's among them: one or several trees of m tokens, whose
    first have the depth 0."""

    states: Any  # [m, M·H]: the tapped states of the tokens before; or of m nodes their parents' outputs [H]
    first: int  # of the rows whose results are wanted. The nodes before are in the cache already


@dataclass(frozen=True)
class Level:
    """The results at R rows of a pass."""

    outputs: Sequence[Any]  # [R]: a vector [H] of the backend each, in memory that no later pass overwrites
    log_probs: NDArray[np.float32]  # [R, K], falling
    token_ids: NDArray[np.int32]  # [R, K]: the target's ids

    def split(self, rows: Sequence[NewRows]) -> list[Level]:
        ends = accumulate((len(each.tree) - each.first for each in rows), initial=0)
        parts = [slice(start, end) for start, end in pairwise(ends)]
        return [Level(self.outputs[part], self.log_probs[part], self.token_ids[part]) for part in parts]


class EagleNetwork(Cached, Protocol):
    """The passes of an EAGLE-3 drafter, each over rows of distinct slots; their results follow each other."""

    def join(self, pieces: Sequence[Any]) -> Any:
        """Tapped states [m, M·H] of all pieces one after another, in memory of their own."""

    def absorb(self, rows: Sequence[NewRows], top_k: int) -> Level:
        """Write rows made of chains of tokens and tapped states; only the last row's results are wanted."""

    def expand(self, rows: Sequence[NewRows], top_k: int) -> Level:
        """Write the rows of nodes from `first` on."""


@dataclass
class _Context:
    """A slot: its known tokens, of which the cache has rows, and the tapped states that are not in the cache yet."""

    tokens: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)  # of each row in the cache the token that it was made with
    states: Any = None  # [m, M·H]: of the tokens without a row


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

    def unseen(self, slot: int) -> int:
        context = self._contexts[slot]
        return max(0, len(context.tokens) - len(context.behind))

    def append_context(self, slot: int, token_ids: NDArray[np.int64], states: Any) -> None:
        """Passes of a long prompt run here, so that few states wait."""
        context, token = self._contexts[slot], int(token_ids[0])
        if len(context.behind) == len(context.tokens) and context.behind and context.behind[-1] != token:
            made_with = context.behind[-1]
            raise EngineError(f"the drafter's last row was made with token {made_with}, and {token} follows")
        context.tokens += token_ids.tolist()
        context.states = self._network.join([states] if context.states is None else [context.states, states])
        if len(context.states) > self._chunk:
            self._absorb({slot: context.tokens[len(context.behind) + 1 :]}, 1)

    def truncate(self, slot: int, length: int) -> None:
        context = self._contexts[slot]
        del context.tokens[length:]
        del context.behind[length:]
        self._network.cache.truncate(slot, len(context.behind))
        waiting = len(context.tokens) - len(context.behind)
        context.states = context.states[:waiting] if waiting else None

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A pass for every level but the last, over the trees of all slots; the first takes in the states they have not
        seen. Raises EngineError, before it, where a request may expand more nodes than the drafter has rows for."""
        following = {}
        for request in requests:
            slot, context = request.slot, self._contexts[request.slot]
            if context.states is None:
                raise EngineError(f"slot {slot} has no new target states to draft from")
            if (wanted := self._width * (request.length - 1)) > self._most_nodes:  # the last level's are not expanded
                raise EngineError(
                    f"a draft of {request.length} levels with {self._width} nodes expanded in each may need {wanted} "
                    f"rows, and the drafter has {self._most_nodes}"
                )
            following[slot] = [*context.tokens[len(context.behind) + 1 :], request.bonus_token]
        top_k = max(request.top_k for request in requests)
        roots = self._absorb(following, top_k)
        growths = [_Growth(request, root) for request, root in zip(requests, roots, strict=True)]
        for level in range(1, max(request.length for request in requests)):
            growing = [growth for growth in growths if level < growth.request.length and growth.expand(self._width)]
            if not growing:
                break
            rows = [growth.rows() for growth in growing]
            for growth, results in zip(growing, self._network.expand(rows, top_k).split(rows), strict=True):
                growth.add(results)
        return [Draft(growth.candidates()) for growth in growths]

    def _absorb(self, following: Mapping[int, list[int]], top_k: int) -> list[Level]:
        """Make the rows of slots' waiting states with the tokens [m] behind theirs: the results of each last row."""
        last = {}
        for slot, tokens in following.items():
            *alone, rest = split(len(tokens), self._chunk, len(following))
            for part in alone:
                self._absorb_pass({slot: tokens[part]}, 1)
            last[slot] = tokens[rest]
        return self._absorb_pass(last, top_k)

    def _absorb_pass(self, following: Mapping[int, list[int]], top_k: int) -> list[Level]:
        rows = []
        for slot, tokens in following.items():
            states = self._contexts[slot].states[: len(tokens)]
            rows.append(NewRows(slot, token_chain(np.array(tokens, np.int64)), states, len(tokens) - 1))
        levels = self._network.absorb(rows, top_k).split(rows)
        for slot, tokens in following.items():
            context = self._contexts[slot]
            self._network.cache.append(slot, len(tokens))
            context.behind += tokens
            context.states = context.states[len(tokens) :] if len(tokens) < len(context.states) else None
        return levels


class _Growth:
    """A draft in the making: its rows of candidates, and the nodes that were expanded."""

    def __init__(self, request: DraftRequest, root: Level) -> None:
        self.request = request
        self._tokens: list[int] = []  # of expanded nodes, in the order of their rows
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._features: list[Any] = []
        self._outputs: list[Any] = []  # of every row of candidates
        self._log_probs: list[NDArray[np.float32]] = []  # [R, K] in all
        self._ids: list[NDArray[np.int32]] = []
        self._next_rows = np.empty((0, root.log_probs[:, : request.top_k].shape[1]), np.int32)  # [R, K]
        self._weights = [np.zeros(1)]  # [R] in all: log-weight of the node whose children a row has
        self._first = 0  # of the nodes of the latest `expand`
        self.add(root)

    def expand(self, count: int) -> bool:
        """Choose the `count` most probable candidates of the last level as nodes; False where there is no candidate."""
        weights = np.concatenate(self._log_probs).astype(np.float64) + np.concatenate(self._weights)[:, None]
        weights[: self._latest] = -np.inf
        order = np.argsort(-weights, axis=None, kind="stable")[:count]
        order = order[np.isfinite(weights.flat[order])]
        if not len(order):
            return False
        self._first, ids = len(self._tokens), np.concatenate(self._ids)
        for node, place in enumerate(order.tolist(), start=self._first):
            row, column = divmod(place, ids.shape[1])
            self._next_rows[row, column] = 1 + node  # the root's row is row 0
            self._tokens.append(int(ids[row, column]))
            self._parents.append(row - 1)
            self._depths.append(self._depths[row - 1] + 1 if row else 0)
            self._features.append(self._outputs[row])
        self._weights.append(weights.flat[order])
        return True

    def rows(self) -> NewRows:
        """The nodes of the latest `expand`, and all before."""
        parents, depths = np.array(self._parents, np.int32), np.array(self._depths, np.int32)
        tree = TokenTree(np.array(self._tokens, np.int64), parents, depths)
        return NewRows(self.request.slot, tree, list(self._features), self._first)

    def add(self, level: Level) -> None:
        """Take the results of the nodes of the latest `expand`, or of the root."""
        self._latest = len(self._next_rows)  # the first row of the last level
        log_probs = level.log_probs[:, : self.request.top_k]
        self._outputs += level.outputs
        self._log_probs.append(log_probs)
        self._ids.append(level.token_ids[:, : self.request.top_k])
        self._next_rows = np.concatenate([self._next_rows, np.full(log_probs.shape, -1, np.int32)])

    def candidates(self) -> LinkedRows:
        return LinkedRows(np.concatenate(self._log_probs), np.concatenate(self._ids), self._next_rows)
