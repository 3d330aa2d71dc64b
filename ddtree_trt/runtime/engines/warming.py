"""The passes of a single sequence, made once when an engine is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ddtree_trt.runtime.engines.base import Engine, VerifyRequest
from ddtree_trt.runtime.tree import token_chain


def make_single_passes(engine: Engine, sizes: Iterable[int], drafts: Callable[[], None] | None) -> None:
    """Run slot 0, which must be empty and is left so, through verifications of `sizes` tokens, the largest first, and
    a prompt's longest chunk; then call `drafts`, for which the slot has target states. None: a drafter without any."""
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
