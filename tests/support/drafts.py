"""Drafts as tests read them."""

from __future__ import annotations

from ddtree_trt.runtime.candidates import Marginals
from ddtree_trt.runtime.engines.base import Draft


def marginals(draft: Draft) -> Marginals:
    """The candidates of a draft whose positions do not depend on each other."""
    assert isinstance(draft.candidates, Marginals)
    return draft.candidates
