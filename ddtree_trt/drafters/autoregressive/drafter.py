"""The autoregressive drafter, which is the same class on all backends: it drafts chains token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime.candidates import Marginals
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, DrawnFrom, VerifyRequest
from ddtree_trt.runtime.engines.drafters import Drafter, LanguageModel, split
from ddtree_trt.runtime.tree import token_chain


@dataclass
class _Context:
    committed: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)  # tokens of its cache: committed ones, then drafted ones
    agreed: int = 0  # leading tokens of `cached` that equal the committed ones


class AutoregressiveDrafter(Drafter):
    """A small language model; cached rows of a draft stay where the target accepted their tokens."""

    def __init__(self, model: LanguageModel, chunk: int) -> None:
        """`chunk`: most tokens of one pass."""
        self._model = model
        self._chunk = chunk
        self._contexts = [_Context() for _ in range(model.cache.slots)]

    def context_length(self, slot: int) -> int:
        return len(self._contexts[slot].committed)

    def unseen(self, slot: int) -> int:
        return max(0, self.context_length(slot) - len(self._contexts[slot].cached))

    def append_context(self, slot: int, token_ids: NDArray[np.int64], states: Any) -> None:
        self._contexts[slot].committed += token_ids.tolist()
        self._roll_back(slot)

    def truncate(self, slot: int, length: int) -> None:
        context = self._contexts[slot]
        del context.committed[length:]
        del context.cached[length:]
        context.agreed = min(context.agreed, length)
        self._roll_back(slot)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A pass for every token, over all slots that still draft. The first takes in what they have not seen."""
        chains = []
        for request in requests:
            slot, context = request.slot, self._contexts[request.slot]
            self._roll_back(slot)
            tokens = [*context.committed[context.agreed :], request.bonus_token]
            *alone, last = split(len(tokens), self._chunk, len(requests))
            for part in alone:
                self._extend([_Chain(request, tokens[part])])
            chains.append(_Chain(request, tokens[last]))
        for depth in range(max(request.length for request in requests)):
            drafting = [chain for chain in chains if depth < chain.request.length]
            for chain, logits in zip(drafting, self._extend(drafting), strict=True):
                chain.add(depth, logits)
        return [chain.draft() for chain in chains]

    def _roll_back(self, slot: int) -> None:
        """Forget rows that were not committed: passes of other slots may run along an idle one's."""
        c = self._contexts[slot]
        longest = min(len(c.cached), len(c.committed))
        while c.agreed < longest and c.cached[c.agreed] == c.committed[c.agreed]:
            c.agreed += 1
        del c.cached[c.agreed :]
        self._model.cache.truncate(slot, c.agreed)

    def _extend(self, chains: Sequence[_Chain]) -> Sequence[NDArray[np.float32]]:
        """Append the tokens of chains to their caches: of each the last one's logits [V]."""
        asked = [(chain.request.slot, token_chain(np.array(chain.tokens, np.int64))) for chain in chains]
        logits = self._model.extend([VerifyRequest(*each, rows="last") for each in asked])
        for chain in chains:
            self._contexts[chain.request.slot].cached += chain.tokens
        return logits


@dataclass
class _Chain:
    request: DraftRequest
    tokens: list[int]  # those that the next pass takes
    log_probs: list[NDArray[np.float32]] = field(default_factory=list)  # of each drawn token's candidates [K]
    token_ids: list[NDArray[np.int32]] = field(default_factory=list)
    drawn: list[DrawnFrom] = field(default_factory=list)

    def add(self, depth: int, logits: NDArray[np.float32]) -> None:
        """Draw the token behind the last one, whose logits are [V]."""
        best, ids = _most_probable(logits, self.request.top_k)
        self.drawn.append(self.request.draw(best, ids, depth))
        self.tokens = [self.drawn[-1].token]
        self.log_probs.append(best)
        self.token_ids.append(ids)

    def draft(self) -> Draft:
        return Draft(Marginals(np.stack(self.log_probs), np.stack(self.token_ids)), tuple(self.drawn))


def _most_probable(logits: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Log-probabilities and ids of the k most probable tokens of logits [V], by falling probability."""
    k = min(k, len(logits))
    ids = np.argpartition(-logits, k - 1)[:k]
    ids = ids[np.lexsort((ids, -logits[ids]))]
    top = logits.max()
    total = np.log(np.exp(logits - top, dtype=np.float32).sum(dtype=np.float64)) + top
    return (logits[ids] - total).astype(np.float32), ids.astype(np.int32)
