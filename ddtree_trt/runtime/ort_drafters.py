"""The two kinds of drafter behind the ONNX Runtime engine.

A drafter follows the target's committed tokens at its own pace: it is told of them at once and takes them in when it
next drafts.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import tensors as names
from ddtree_trt.artifact import DrafterDims
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.engine import Draft, DraftRequest
from ddtree_trt.runtime.ort_network import LanguageModel, Network, Pass
from ddtree_trt.runtime.tree import TokenTree, chain_parents


class Drafter(Protocol):
    """What the engine asks of a drafter."""

    def known(self, slot: int) -> int:
        """Leading committed tokens the drafter has been told of."""

    def learn(self, slot: int, token_ids: NDArray[np.int64], states: NDArray[np.float32] | None) -> None:
        """Tokens [m] were committed behind the known ones; their tapped target states [m, M·H] where there are taps."""

    def truncate(self, slot: int, length: int) -> None:
        """Forget what lies behind the first `length` committed tokens; fewer may be known."""

    def draft(self, request: DraftRequest) -> Draft:
        """Draft behind the bonus token, on top of every committed token."""


class _States:
    """Tapped target states the drafter's cache does not hold yet."""

    def __init__(self) -> None:
        self.rows = 0
        self._pieces: list[NDArray[np.float32]] = []  # [rows, M·H]

    def add(self, states: NDArray[np.float32]) -> None:
        self._pieces.append(states)
        self.rows += len(states)

    def cut(self, rows: int) -> None:
        if rows < self.rows:
            self._pieces = [np.concatenate(self._pieces)[:rows]] if rows else []
            self.rows = rows

    def take(self) -> NDArray[np.float32]:
        states = self._pieces[0] if len(self._pieces) == 1 else np.concatenate(self._pieces)
        self._pieces, self.rows = [], 0
        return states


class BlockDrafter:
    """DFlash: one pass over [bonus, MASK × L], conditioned on the tapped target states of every committed token."""

    def __init__(self, network: Network, dims: DrafterDims, chunk: int, scratch: int) -> None:
        """`chunk`: most states one pass takes in; `scratch`: cache rows the graph writes behind the block."""
        self._network, self._dims, self._chunk, self._scratch = network, dims, chunk, scratch
        self._pending = [_States() for _ in range(network.cache.slots)]

    def known(self, slot: int) -> int:
        return self._network.cache.lengths[slot] + self._pending[slot].rows

    def learn(self, slot: int, token_ids: NDArray[np.int64], states: NDArray[np.float32] | None) -> None:
        assert states is not None, "a target built for a block drafter taps its states"
        self._pending[slot].add(states)

    def truncate(self, slot: int, length: int) -> None:
        cache = self._network.cache
        context = min(cache.lengths[slot], length)
        cache.truncate(slot, context)
        self._pending[slot].cut(length - context)

    def draft(self, request: DraftRequest) -> Draft:
        slot, dims, cache = request.slot, self._dims, self._network.cache
        if not self._pending[slot].rows:
            raise EngineError(f"slot {slot} has no new target states to draft from")
        states = self._pending[slot].take()
        block = np.full((1, dims.block_size), dims.mask_token_id, np.int64)
        block[0, 0] = request.bonus_token
        k = min(request.top_k, dims.vocab_size)
        length = dims.block_size - 1
        log_probs, token_ids = np.empty((1, length, k), np.float32), np.empty((1, length, k), np.int64)
        for start in range(0, len(states), self._chunk):
            # All but the last piece only extend the drafter's context; their block is overwritten by the next.
            piece = states[start : start + self._chunk]
            past, rows = cache.lengths[slot], len(piece) + dims.block_size
            inputs: dict[str, NDArray[Any]] = {
                names.TAPS: piece[None],
                names.TOKEN_IDS: block,
                names.POSITIONS: np.arange(past, past + rows, dtype=np.int64)[None],
                names.TOP_K: np.array([k], np.int64),
            }
            outputs: dict[str, NDArray[Any]] = {names.LOG_PROBS: log_probs, names.CANDIDATES: token_ids}
            self._network.run(slot, rows, inputs, outputs, scratch=self._scratch)
            cache.append(slot, len(piece))
        return Draft(log_probs[0], token_ids[0].astype(np.int32))


class _Context:
    """An autoregressive drafter's view of one slot."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self.cached: list[int] = []  # what its cache holds: committed tokens, then what it went on from itself
        self.agreed = 0  # leading tokens of `cached` known to be the committed ones

    def roll_back(self) -> int:
        """Forget cached tokens that were not committed; returns how many are left."""
        kept, longest = self.agreed, min(len(self.cached), len(self.committed))
        while kept < longest and self.cached[kept] == self.committed[kept]:
            kept += 1
        del self.cached[kept:]
        self.agreed = kept
        return kept


class AutoregressiveDrafter:
    """A small language model that drafts token by token, each drawn by the request. What it cached of a draft stays
    as far as the target accepted it."""

    def __init__(self, model: LanguageModel, chunk: int) -> None:
        """`chunk`: most tokens one pass takes in."""
        self._model, self._chunk = model, chunk
        self._contexts = [_Context() for _ in range(model.cache.slots)]

    def known(self, slot: int) -> int:
        return len(self._contexts[slot].committed)

    def learn(self, slot: int, token_ids: NDArray[np.int64], states: NDArray[np.float32] | None) -> None:
        self._contexts[slot].committed += token_ids.tolist()

    def truncate(self, slot: int, length: int) -> None:
        context = self._contexts[slot]
        del context.committed[length:]
        del context.cached[length:]
        context.agreed = min(context.agreed, length)

    def draft(self, request: DraftRequest) -> Draft:
        slot, context = request.slot, self._contexts[request.slot]
        self._model.cache.truncate(slot, context.roll_back())
        tokens = [*context.committed[context.agreed :], request.bonus_token]
        log_probs, token_ids, drawn = [], [], []
        for _ in range(request.length):
            logits = self._append(slot, context, tokens)
            best, ids = _most_probable(logits, request.top_k)
            drawn.append(request.draw(best, ids))
            tokens = [drawn[-1].token]
            log_probs.append(best)
            token_ids.append(ids)
        return Draft(np.stack(log_probs), np.stack(token_ids), tuple(drawn))

    def _append(self, slot: int, context: _Context, tokens: list[int]) -> NDArray[np.float32]:
        """Take tokens into the cache; the logits [V] behind the last one."""
        said: Pass | None = None
        for start in range(0, len(tokens), self._chunk):
            piece = np.array(tokens[start : start + self._chunk], np.int64)
            size = len(piece)
            tree = TokenTree(piece, chain_parents(size), np.arange(size, dtype=np.int32))
            said = self._model.extend(slot, tree, np.array([size - 1]))
            self._model.cache.append(slot, size)
            context.cached += piece.tolist()
        assert said is not None, "a draft starts at the bonus token at least"
        return said.logits[0]


def _most_probable(logits: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Log-probabilities and ids of the k most probable tokens of logits [V], falling."""
    k = min(k, len(logits))
    ids = np.argpartition(-logits, k - 1)[:k]
    ids = ids[np.lexsort((ids, -logits[ids]))]
    top = logits.max()
    total = np.log(np.exp(logits - top, dtype=np.float32).sum(dtype=np.float64)) + top
    return (logits[ids] - total).astype(np.float32), ids.astype(np.int32)
