"""Drafts as tests read them and change them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ddtree_trt.runtime.engines.base import Draft, DrawnFrom
from ddtree_trt.runtime.tree import Marginals

LIES = ("none", "some", "all")


def marginals(draft: Draft) -> Marginals:
    """The candidates of a drafter that drafts every position by itself."""
    assert isinstance(draft.candidates, Marginals)
    return draft.candidates


def with_lies(draft: Draft, lies: str, vocab_size: int) -> Draft:
    """A draft of any kind in which no token, every third of the vocabulary, or all of them have changed places."""
    ids = np.arange(vocab_size, dtype=np.int32)
    changed = np.full(vocab_size, lies == "all") if lies != "some" else np.minimum(ids, ids[::-1]) % 3 == 0
    other = np.where(changed, ids[::-1], ids)
    candidates = draft.candidates
    drawn = draft.drawn and tuple(DrawnFrom(int(other[d.token]), other[d.candidates], d.probs) for d in draft.drawn)
    return Draft(replace(candidates, token_ids=other[candidates.token_ids]), drawn)
