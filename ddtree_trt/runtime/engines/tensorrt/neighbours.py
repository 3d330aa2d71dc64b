"""Passes over neighbouring slots: the form that native attention needs.

TensorRT's own cache update writes whole batches: row n of a pass goes to row n of what is bound as the cache. Several
slots are therefore one pass over the smallest range of neighbours that holds them. An idle slot within the range runs
along, as a tree of one token behind its committed rows: nothing reads what it writes, its next pass overwrites it, and
its results are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddtree_trt.runtime.engines.base import VerifyRequest
from ddtree_trt.runtime.tree import token_chain

_IDLE = token_chain(np.zeros(1, np.int64))


def neighbouring(slots: Sequence[int]) -> list[int]:
    """The slots from the first to the last of these."""
    return list(range(min(slots), max(slots) + 1))


def with_idle_trees(requests: Sequence[VerifyRequest]) -> list[VerifyRequest]:
    """The requests in the order of their slots, with a tree for every idle slot between them."""
    wanted = {r.slot: r for r in requests}
    return [wanted.get(slot) or VerifyRequest(slot, _IDLE) for slot in neighbouring(list(wanted))]
