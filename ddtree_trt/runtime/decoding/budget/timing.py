"""Timed rounds of an engine: drafts and verifications as decoding runs them, on one slot or several in one pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime.engines.base import DraftRequest, DrawnFrom, Engine, VerifyRequest
from ddtree_trt.runtime.tree import TokenTree, chain_parents

TREE_TOKENS = (1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513, 1025)
COSTLY = 8.0  # trees are measured until one costs this many single-token passes: larger ones cannot pay
REPETITIONS = (2, 10)  # least and most of every size
IN_A_ROW = 4  # rounds of one size in each repetition, of one slot
LONG_PASS_S = 0.02  # a pass of this time or more is timed once in each repetition
DRAFT_LENGTHS = (1, 5)  # lengths of the timed drafts of an autoregressive drafter
DRAFT_ROWS = 4  # new context rows of the measured drafter pass, about as many as a round commits


@dataclass(frozen=True)
class Timings:
    """Seconds of passes over all slots that were timed together."""

    draft_s: float  # a draft, without the cost per drafted token
    token_s: float  # each drafted token, where the drafter drafts token by token
    verify_s: dict[int, float]  # by the tree tokens of every slot, rising from 1


def fill(engine: Engine, slot: int, context: int) -> None:
    """Prefill the slot with random tokens until it holds `context` of them."""
    limits, vocab = engine.manifest.limits, engine.manifest.target_dims.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab, context)
    # The last row anew: a drafter may have made its own with the token that rounds put behind it.
    engine.truncate(slot, max(0, engine.length(slot) - 1))
    while (start := engine.length(slot)) < context:
        engine.prefill(slot, tokens[start : start + limits.prefill_chunk], rows="none", taps=True)


def time_rounds(engine: Engine, slots: int, context: int, seconds: float) -> Timings:
    """The fastest times of rounds of the first `slots` slots, which hold `context` tokens each, within about `seconds`.
    Every size is timed REPETITIONS[0] times, however long that takes."""
    deadline = time.perf_counter() + seconds
    rounds = _Rounds(engine, slots, context)
    verify: dict[int, float] = {}
    for t in _tree_tokens(engine):
        verify[t] = rounds.fastest(t)[1]
        if verify[t] > COSTLY * verify[1]:
            break
    # The first draft after a prefill, above, also processed the prompt's states; drafts of rounds do not.
    drafts = dict.fromkeys((1,) if engine.manifest.drafting.at_once else DRAFT_LENGTHS, float("inf"))
    for repetition in range(REPETITIONS[1]):
        for length in drafts:
            for t in verify:
                draft_s, verify_s = rounds.fastest(t, length)
                drafts[length], verify[t] = min(drafts[length], draft_s), min(verify[t], verify_s)
        if repetition + 1 >= REPETITIONS[0] and time.perf_counter() > deadline:
            break
    token_s = max(0.0, (drafts[max(drafts)] - drafts[1]) / max(1, max(drafts) - 1))
    return Timings(max(0.0, drafts[1] - token_s), token_s, verify)


def _tree_tokens(engine: Engine) -> list[int]:
    """Sizes to measure: TREE_TOKENS, or where an engine pads its passes the sizes it pads them to."""
    largest = 1 + engine.manifest.limits.max_tree_budget
    sizes = [t for t in TREE_TOKENS if t <= largest]
    if engine.buckets is None:
        return sizes
    return sorted({next((b for b in engine.buckets if b >= t), t) for t in sizes})


class _Rounds:
    """Rounds of the first slots of an engine, which hold `context` tokens before and after each."""

    def __init__(self, engine: Engine, slots: int, context: int) -> None:
        self._engine, self._slots, self._context = engine, range(slots), context

    def fastest(self, tokens: int, length: int = 1) -> tuple[float, float]:
        """(draft, verify) seconds, the fastest of a few successive rounds: the first ones run with the caches and clock
        that another tree size left. That hardly affects long passes, and those of several slots, timed once."""
        draft_s, verify_s = self._round(tokens, length)
        for _ in range(IN_A_ROW - 1 if len(self._slots) == 1 else 0):
            if verify_s > LONG_PASS_S:
                break
            draft, verify = self._round(tokens, length)
            draft_s, verify_s = min(draft_s, draft), min(verify_s, verify)
        return draft_s, verify_s

    def _round(self, tokens: int, length: int) -> tuple[float, float]:
        """(draft, verify) seconds of one round in the order of decoding, since earlier work decides the contents of the
        processor's caches: a single token follows a single token, a tree its draft."""
        self._verify(tokens)
        if tokens == 1:
            return float("inf"), _timed(self._verify, 1)
        path = np.arange(min(DRAFT_ROWS, tokens), dtype=np.int32)
        for slot in self._slots:
            self._engine.commit(slot, path, taps=True)
        draft_s = _timed(self._draft, length)
        verify_s = _timed(self._verify, tokens)
        for slot in self._slots:
            self._engine.truncate(slot, self._context)
        return draft_s, verify_s

    def _verify(self, tokens: int) -> None:
        depths = np.arange(tokens, dtype=np.int32)
        tree = TokenTree(np.ones(tokens, np.int64), chain_parents(tokens), np.minimum(depths, 16))
        self._engine.verify([VerifyRequest(slot, tree) for slot in self._slots])

    def _draft(self, length: int) -> None:
        self._engine.draft([DraftRequest(slot, 1, 16, length, _most_probable) for slot in self._slots])


def _most_probable(log_probs: NDArray[np.float32], token_ids: NDArray[np.int32], depth: int) -> DrawnFrom:
    return DrawnFrom(int(token_ids[0]), token_ids[:1], np.ones(1))


def _timed(work: Callable[[int], None], size: int) -> float:
    start = time.perf_counter()
    work(size)
    return time.perf_counter() - start
