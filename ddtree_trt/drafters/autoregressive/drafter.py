"""The autoregressive drafter, which is the same class on all backends: it drafts a chain token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime.candidates import Marginals
from ddtree_trt.runtime.engines.base import Draft, DraftRequest
from ddtree_trt.runtime.engines.drafters import Drafter, LanguageModel, Pass
from ddtree_trt.runtime.tree import token_chain


class _Context:
    """An autoregressive drafter's record of one slot."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self.cached: list[int] = []  # tokens of its cache: committed ones, then drafted ones
        self.agreed = 0  # leading tokens of `cached` that equal the committed ones

    def roll_back(self) -> int:
        """Forget cached tokens that were not committed; returns the number of those left."""
        kept, longest = self.agreed, min(len(self.cached), len(self.committed))
        while kept < longest and self.cached[kept] == self.committed[kept]:
            kept += 1
        del self.cached[kept:]
        self.agreed = kept
        return kept


class AutoregressiveDrafter(Drafter):
    """A small language model that drafts token by token, each drawn by the request. Cached rows of a draft stay in
    the cache if the target accepted their tokens."""

    def __init__(self, model: LanguageModel, chunk: int) -> None:
        """`chunk`: most tokens of one pass."""
        self._model = model
        self._chunk = chunk
        self._contexts = [_Context() for _ in range(model.cache.slots)]

    def context_length(self, slot: int) -> int:
        return len(self._contexts[slot].committed)

    def append_context(self, slot: int, token_ids: NDArray[np.int64], states: Any) -> None:
        self._contexts[slot].committed += token_ids.tolist()

    def truncate(self, slot: int, length: int) -> None:
        context = self._contexts[slot]
        del context.committed[length:]
        del context.cached[length:]
        context.agreed = min(context.agreed, length)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One pass per slot and token."""
        return [self._draft(request) for request in requests]

    def warm_up(self, slot: int, budget: int) -> None:
        """Does nothing: on a GPU, passes of one token are captured at their first use."""

    def _draft(self, request: DraftRequest) -> Draft:
        slot, context = request.slot, self._contexts[request.slot]
        self._model.cache.truncate(slot, context.roll_back())
        tokens = [*context.committed[context.agreed :], request.bonus_token]
        log_probs, token_ids, drawn = [], [], []
        for depth in range(request.length):
            logits = self._append(slot, context, tokens)
            best, ids = _most_probable(logits, request.top_k)
            drawn.append(request.draw(best, ids, depth))
            tokens = [drawn[-1].token]
            log_probs.append(best)
            token_ids.append(ids)
        return Draft(Marginals(np.stack(log_probs), np.stack(token_ids)), tuple(drawn))

    def _append(self, slot: int, context: _Context, tokens: list[int]) -> NDArray[np.float32]:
        """Append tokens to the cache; returns the logits [V] of the last one."""
        result: Pass | None = None
        for start in range(0, len(tokens), self._chunk):
            piece = np.array(tokens[start : start + self._chunk], np.int64)
            size = len(piece)
            tree = token_chain(piece)
            result = self._model.extend(slot, tree, np.array([size - 1]))
            self._model.cache.append(slot, size)
            context.cached += piece.tolist()
        assert result is not None, "a draft starts at the bonus token at least"
        return result.logits[0]


def _most_probable(logits: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Log-probabilities and ids of the k most probable tokens of logits [V], by falling probability."""
    k = min(k, len(logits))
    ids = np.argpartition(-logits, k - 1)[:k]
    ids = ids[np.lexsort((ids, -logits[ids]))]
    top = logits.max()
    total = np.log(np.exp(logits - top, dtype=np.float32).sum(dtype=np.float64)) + top
    return (logits[ids] - total).astype(np.float32), ids.astype(np.int32)
