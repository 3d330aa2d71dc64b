"""Warm-up passes of a single sequence, run when an engine is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ddtree_trt.runtime.engines.base import Engine, VerifyRequest
from ddtree_trt.runtime.tree import token_chain


def make_single_passes(engine: Engine, sizes: Iterable[int], drafts: Callable[[], None] | None) -> None:
    """Verify trees of `sizes` tokens, the largest first, and prefill a prompt's longest chunk, in slot 0, which must be
    empty and is left empty. Then call `drafts` with the prompt still in the slot; None for a drafter without taps."""
    limits = engine.manifest.limits
    chunk = min(limits.prefill_chunk, limits.max_seq_len - 1)
    try:
        for tokens in sorted(sizes, reverse=True):
            engine.verify([VerifyRequest(0, token_chain(np.zeros(tokens, np.int64)))])
        engine.prefill(0, np.zeros(chunk, np.int64), rows="last", taps=drafts is not None)
        if drafts is not None:
            drafts()
    finally:
        engine.truncate(0, 0)
