"""Warm-up passes of a single sequence, run when an engine is opened."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from ddtree_trt.artifact.progress import Progress
from ddtree_trt.runtime.engines.base import Engine, VerifyRequest
from ddtree_trt.runtime.tree import token_chain


def make_single_passes(
    engine: Engine,
    sizes: Collection[int],
    drafts: Callable[[int], None] | None,
    progress: Progress,
    *,
    slots: int = 1,
) -> None:
    """In each of the first `slots` slots, verify trees of `sizes` tokens, the largest first, and prefill a prompt's
    longest chunk. Then call `drafts` with the slot, which still holds the prompt; None for a drafter without taps.

    The slots must be empty and are left empty. `progress` counts the passes; `drafts` counts as one.
    """
    limits = engine.manifest.limits
    chunk = min(limits.prefill_chunk, limits.max_seq_len - 1)
    done, total = 0, slots * (len(sizes) + 1 + (drafts is not None))

    def step() -> None:
        nonlocal done
        done += 1
        progress("warm up", done, total)

    for slot in range(slots):
        try:
            for tokens in sorted(sizes, reverse=True):
                engine.verify([VerifyRequest(slot, token_chain(np.zeros(tokens, np.int64)))])
                step()
            engine.prefill(slot, np.zeros(chunk, np.int64), rows="last", taps=drafts is not None)
            step()
            if drafts is not None:
                drafts(slot)
                step()
        finally:
            engine.truncate(slot, 0)
