"""Timed passes of an engine: drafts and verifications as decoding makes them, on one slot or several in one pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime.engines.base import DraftRequest, DrawnFrom, Engine, VerifyRequest
from ddtree_trt.runtime.tree import TokenTree, chain_parents

COSTLY = 8.0  # sizes are timed until one takes this many single-token passes: larger ones cannot pay
SWEEPS, SECONDS = 10, 0.7  # most sweeps over the sizes, and the time after which no other begins
PASSES = 4  # of a timed draft of a drafter that makes several


class Timed(NamedTuple):
    """Seconds of passes over all slots that were timed together: the fastest, since other work only adds to times."""

    draft_s: float  # a draft, or one pass of a drafter that makes several
    verify: list[tuple[int, float]]  # tree tokens of every slot, rising from 1, and the pass's seconds


def time_passes(engine: Engine, slots: int, context: int, tree_tokens: Sequence[int]) -> Timed:
    """Times of the first `slots` slots, which must be free and then hold `context` tokens each. They are emptied."""
    if engine.buckets is not None:
        tree_tokens = sorted({next((b for b in engine.buckets if b >= t), t) for t in tree_tokens})
    passes = 1 if engine.manifest.drafting.block_size else PASSES
    verify, draft_s, end = dict[int, float](), float("inf"), time.perf_counter() + SECONDS
    try:
        for slot in range(slots):
            _fill(engine, slot, context)
        _round(engine, slots, context, 1, passes)  # the first draft behind a prompt takes it in, those of rounds do not
        for sweep in range(SWEEPS):
            for tokens in tree_tokens if sweep == 0 else list(verify):
                drafted_s, verified_s = _round(engine, slots, context, tokens, passes)
                draft_s = min(draft_s, drafted_s / passes)
                verify[tokens] = min(verify.get(tokens, float("inf")), verified_s)
                if verify[tokens] > COSTLY * verify[1]:
                    break
            if time.perf_counter() > end:
                break
    finally:
        for slot in range(slots):
            engine.truncate(slot, 0)
    return Timed(draft_s, list(verify.items()))


def _fill(engine: Engine, slot: int, context: int) -> None:
    """Prefill the slot with random tokens until it holds `context` of them."""
    limits, vocab = engine.manifest.limits, engine.manifest.target_dims.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab, context)
    while (start := engine.length(slot)) < context:
        engine.prefill(slot, tokens[start : start + limits.prefill_chunk], rows="none", taps=True)


def _round(engine: Engine, slots: int, context: int, tokens: int, passes: int) -> tuple[float, float]:
    """(draft, verify) seconds of one round in the order of decoding, since earlier work decides the contents of the
    processor's caches."""
    _verify(engine, slots, 1)
    for slot in range(slots):
        engine.commit(slot, np.zeros(1, np.int32), taps=True)
    requests = [DraftRequest(slot, 1, 16, passes, _most_probable) for slot in range(slots)]
    draft_s = _timed(lambda: engine.draft(requests))
    verify_s = _timed(lambda: _verify(engine, slots, tokens))
    for slot in range(slots):
        engine.truncate(slot, context)
    return draft_s, verify_s


def _verify(engine: Engine, slots: int, tokens: int) -> None:
    depths = np.minimum(np.arange(tokens, dtype=np.int32), 16)
    tree = TokenTree(np.ones(tokens, np.int64), chain_parents(tokens), depths)
    engine.verify([VerifyRequest(slot, tree) for slot in range(slots)])


def _most_probable(log_probs: NDArray[np.float32], token_ids: NDArray[np.int32], depth: int) -> DrawnFrom:
    return DrawnFrom(int(token_ids[0]), token_ids[:1], np.ones(1))


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
