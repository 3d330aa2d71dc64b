"""Engine calls as control data: int32 values that rank 0 sends and the other ranks execute.

A record holds any number of calls: their count of values first, then for each call its `Call`, its number of values,
and these. Calls that need no other rank wait in rank 0's `Outbox` for the next one that does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.engines.base import DraftRequest, DrawnFrom, LogitRows, VerifyRequest
from ddtree_trt.runtime.tree import TokenTree

Int32 = NDArray[np.int32]
ROWS: tuple[LogitRows, ...] = ("none", "last", "all")
_DRAFT = 4  # values of a draft's request


class Call(IntEnum):
    CLOSE = 0
    TRUNCATE = 1
    COMMIT = 2
    PREFILL = 3
    DRAFT = 4
    VERIFY = 5
    READ = 6  # whole rows of a verdict's logits


def record_size(limits: Limits) -> int:
    """Most values of a record: one call of the longest kind."""
    tokens, slots = limits.max_tokens_per_pass, limits.max_batch
    return 3 + max(3 + tokens, slots * _DRAFT, slots * (2 + 3 * tokens))


class Outbox:
    """Calls of rank 0 that the other ranks do not have yet."""

    def __init__(self, size: int) -> None:
        """`size`: values of a record."""
        self._size = size
        self._waiting: list[Int32] = []

    def add(self, call: Call, *values: ArrayLike) -> Int32 | None:
        """Append a call. Returns the record of earlier ones where it has no room beside them, to be sent first."""
        parts = [np.asarray(value, np.int32).reshape(-1) for value in values]
        body = np.concatenate([np.empty(0, np.int32), *parts])
        whole = np.concatenate([np.array([call, len(body)], np.int32), body])
        if 1 + len(whole) > self._size:
            raise EngineError(f"a call of {len(whole)} values is longer than the {self._size} this engine was made for")
        full = self.take() if 1 + sum(map(len, self._waiting)) + len(whole) > self._size else None
        self._waiting.append(whole)
        return full

    def take(self) -> Int32:
        """The record of the waiting calls, which wait no longer."""
        calls = np.concatenate([np.empty(0, np.int32), *self._waiting])
        self._waiting.clear()
        return np.concatenate([np.array([len(calls)], np.int32), calls])


def calls_of(record: Int32) -> Iterator[tuple[Call, Int32]]:
    """The calls of a record with their values, copied."""
    left = record[1 : 1 + record[0]].copy()
    while len(left):
        call, size = Call(left[0]), int(left[1])
        yield call, left[2 : 2 + size]
        left = left[2 + size :]


def draft_values(requests: Sequence[DraftRequest]) -> list[ArrayLike]:
    return [[r.slot, r.bonus_token, r.top_k, r.length] for r in requests]


def drafts_of(values: Int32) -> list[DraftRequest]:
    rows = values.reshape(-1, _DRAFT).tolist()
    return [DraftRequest(slot, bonus, top_k, length, refuse_to_draw) for slot, bonus, top_k, length in rows]


def verify_values(requests: Sequence[VerifyRequest]) -> list[ArrayLike]:
    found: list[ArrayLike] = []
    for r in requests:
        found += [[r.slot, len(r.tree)], r.tree.token_ids, r.tree.parents, r.tree.depths]
    return found


def verifications_of(values: Int32) -> list[VerifyRequest]:
    found = []
    while len(values):
        slot, size = values[:2].tolist()
        token_ids, parents, depths = values[2 : 2 + 3 * size].reshape(3, size)
        found.append(VerifyRequest(slot, TokenTree(token_ids.astype(np.int64), parents, depths)))
        values = values[2 + 3 * size :]
    return found


def refuse_to_draw(*_: object) -> DrawnFrom:
    """The `draw` of a draft request whose drafter draws nothing."""
    raise AssertionError("a block drafter draws nothing")
