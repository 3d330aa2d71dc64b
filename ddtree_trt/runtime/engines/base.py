"""The engine protocol: what the decode loop asks of a backend.

An engine holds `max_batch` slots. A slot is one sequence's cache: the target's keys and values of its committed tokens,
the drafter's of the same, and the tapped target states the drafter has not seen yet. Every verb names the slots it is
for; nothing else is shared between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.runtime.tree import TokenTree

LogitRows = Literal["none", "last", "all"]


@dataclass(frozen=True)
class DrawnFrom:
    """The distribution q a drafted token was drawn from, over its candidates; zero elsewhere."""

    token: int
    candidates: NDArray[np.int32]  # [K]
    probs: NDArray[np.float64]  # [K], sums to 1


# (log_probs [K], token_ids [K], depth from 0) → a draw
Draw = Callable[[NDArray[np.float32], NDArray[np.int32], int], DrawnFrom]


@dataclass(frozen=True)
class DraftRequest:
    slot: int
    bonus_token: int
    top_k: int  # K
    length: int  # most positions worth drafting; a block drafter drafts all L in one pass regardless
    draw: Draw  # how an autoregressive drafter picks each next token; a block drafter ignores it


@dataclass(frozen=True)
class Draft:
    """The drafter's marginals for the L positions after the bonus token, each row sorted by falling probability."""

    log_probs: NDArray[np.float32]  # [L, K]
    token_ids: NDArray[np.int32]  # [L, K]
    drawn: tuple[DrawnFrom, ...] | None = None  # [L]: the tokens an autoregressive drafter went on from


@dataclass(frozen=True)
class VerifyRequest:
    slot: int
    tree: TokenTree


class Rows(Protocol):
    """Logits of R rows: an array, or rows that stay on a device until they are read (`lazy_rows.py`)."""

    def __len__(self) -> int:
        """R."""

    def __getitem__(self, row: int, /) -> NDArray[np.float32]:
        """One row [V]; −1 is the last. Raises IndexError beyond the R rows."""

    def __array__(self, dtype: Any = None, /) -> NDArray[Any]:
        """All rows at once, float32 [R, V]."""


@dataclass(frozen=True)
class Verdict:
    """The target's results at R rows. Both belong to the engine: valid until its next target pass."""

    choices: NDArray[np.int64]  # [R]: the most probable next token
    logits: Rows  # [R, V]


@dataclass(frozen=True)
class RoundRequest:
    """A whole round of one slot, for an engine that builds trees by itself: method `ddtree`."""

    slot: int
    bonus_token: int
    budget: int  # draft nodes, 1 or more
    temperature: float = 0.0  # 0 is greedy
    seed: int = 0  # int64: with position and token, what the draws at a temperature depend on


@dataclass(frozen=True)
class RoundResult:
    tokens: list[int]  # [m]: the target's choices along the accepted path; the last is the next bonus token
    nodes: int  # draft nodes verified


class DeviceRounds(Protocol):
    """Rounds without the host. What a slot is drafted and verified with never leaves the device."""

    by_default: bool  # whether they are worth it here

    def round(self, requests: Sequence[RoundRequest]) -> list[RoundResult]:
        """One round of every slot, committed: each then holds all tokens before the last of its result. The engine may
        already be at work on the next; any other verb for a slot is as if it were not."""


class Engine(Protocol):
    manifest: Manifest
    threads: int  # CPU threads of its own; 1 where the work is done elsewhere

    @property
    def buckets(self) -> Sequence[int] | None:
        """Tree tokens T that a verification is padded to, rising; None where it is not padded."""

    @property
    def rounds(self) -> DeviceRounds | None:
        """Rounds that stay on the device, where the engine has them."""

    def length(self, slot: int) -> int:
        """Committed tokens of the slot."""

    def draftable_length(self, slot: int) -> int:
        """Leading committed tokens whose target states the drafter has or can still be given."""

    def truncate(self, slot: int, length: int) -> None:
        """Forget what lies behind the first `length` tokens; 0 empties the slot."""

    def prefill(self, slot: int, token_ids: NDArray[np.int64], *, rows: LogitRows, taps: bool) -> Verdict:
        """Append tokens [T] causally and commit them. `taps=False` when the slot will never be drafted for.

        The verdict has T rows for `all`, the last one for `last`, and no row for `none`."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One drafter pass per slot over [bonus, MASK × L] on top of every committed token."""

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        """One target pass over each slot's tree; logits for all T nodes. Nothing is committed yet."""

    def commit(self, slot: int, path: NDArray[np.int32], *, taps: bool) -> None:
        """Keep the nodes on `path` [m] (rising, root first) of the slot's last verified tree and forget the others."""

    def warm_up(self) -> None:
        """Do now what the first passes of a single sequence would do beside their work: have libraries set themselves
        up, capture passes. All slots must be empty, and are left so. Nothing depends on it but the time that the first
        requests take."""

    def settle(self) -> None:
        """Wait until everything the verbs have started is done. Only exact stage times need it: what reads results
        waits for them by itself."""

    def close(self) -> None:
        """Release the engine's memory and threads; a second call does nothing."""
