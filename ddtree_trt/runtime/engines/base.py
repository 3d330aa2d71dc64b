"""The engine protocol: the calls of the decode loop to a backend.

An engine holds `max_batch` slots. A slot is one sequence's cache: the target's and the drafter's keys and values of its
committed tokens, and the tapped target states the drafter has not processed yet. Every call names its slots; no state
is shared between slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.runtime.tree import Candidates, DraftTree, TokenTree

LogitRows = Literal["none", "last", "all"]


@dataclass(frozen=True)
class DrawnFrom:
    """The distribution q a drafted token was drawn from, over its candidates; zero elsewhere."""

    token: int
    candidates: NDArray[np.int32]  # [K]
    probs: NDArray[np.float64]  # [K], sums to 1


# (log_probs [K], token_ids [K], depth from 0) → a draw
Draw = Callable[[NDArray[np.float32], NDArray[np.int32], int], DrawnFrom]


def no_draw(*_: object) -> DrawnFrom:
    raise AssertionError("a block drafter draws nothing")


def most_probable(log_probs: NDArray[np.float32], token_ids: NDArray[np.int32], depth: int) -> DrawnFrom:
    return DrawnFrom(int(token_ids[0]), token_ids[:1], np.ones(1))


@dataclass(frozen=True)
class DraftRequest:
    slot: int
    bonus_token: int
    top_k: int  # K; a drafter whose candidates depend on the token before may state more
    length: int  # most positions to draft; a block drafter may draft all L in one pass
    draw: Draw = no_draw  # how an autoregressive drafter picks each next token; a block drafter ignores it


@dataclass(frozen=True)
class Draft:
    """The drafter's candidates for the positions after the bonus token."""

    candidates: Candidates
    drawn: tuple[DrawnFrom, ...] | None = None  # [L]: the tokens an autoregressive drafter drew and continued from


@dataclass(frozen=True)
class VerifyRequest:
    slot: int
    tree: TokenTree  # or, where the engine mixes passes, a chunk of a prompt: a chain
    rows: LogitRows = field(default="all", kw_only=True)  # of a tree always all

    @property
    def first_row(self) -> int:
        """The first of the T rows whose logits are asked for; T for none."""
        return {"all": 0, "last": len(self.tree) - 1, "none": len(self.tree)}[self.rows]


class Rows(Protocol):
    """Logits of R rows: an array, or rows that stay on a device until they are read (`passes.py`)."""

    def __len__(self) -> int:
        """R."""

    def __getitem__(self, place: int | tuple[int, int], /) -> Any:
        """One row [V], or of one row the logit of a token; −1 is the last. Raises IndexError beyond the R rows."""

    def __array__(self, dtype: Any = None, /) -> NDArray[Any]:
        """All rows at once, float32 [R, V]."""


@dataclass(frozen=True)
class Verdict:
    """The target's results at R rows, valid until the engine's next target pass."""

    choices: NDArray[np.int64]  # [R]: the most probable next token
    logits: Rows  # [R, V]


class RoundRequest(NamedTuple):
    """One slot's part in a round on the device."""

    slot: int
    bonus_token: int  # read where no round of the slot is under way
    budget: int  # most draft nodes; 0: none are drafted
    temperature: float = 0.0  # 0 is greedy
    seed: int = 0  # int64: draws at a temperature are a function of seed, position and token
    chain: bool = False  # the tree is the chain of the most probable tokens
    taps: bool = True  # False when the slot will never be drafted for
    looks: bool = False  # whether its result has what was drafted
    tag: Any = None  # the caller's


class RoundResult(NamedTuple):
    """A round of one slot, committed."""

    request: RoundRequest
    tokens: list[int]  # [m]: the target's choices along the accepted path; the last is the next bonus token
    nodes: int  # draft nodes verified
    # Where the request looks and something was drafted, the tree; the nodes of a larger one, of which only log-weights
    # and depths are given; and the accepted path [m], root first.
    drafted: tuple[DraftTree, DraftTree, NDArray[np.int32]] | None = None


class FinishedRound(NamedTuple):
    results: list[RoundResult]
    draft_s: float  # seconds on the device: of drafts
    rest_s: float  # of all else


AHEAD = 2  # rounds under way: the host reads one while the device makes the next


class DeviceRounds(Protocol):
    """Rounds without the host: drafts, trees and logits stay on the device. Some are launched before the host has read
    those before them. Any other call for a slot, and `leave`, forgets what was launched for it: a slot then holds the
    tokens of the rounds that were read."""

    by_default: bool  # whether the mode `auto` uses them on this device

    @property
    def ahead(self) -> int:
        """Rounds that were launched and not yet read, at most AHEAD."""

    def launchable(self, slots: Sequence[int]) -> list[int]:
        """Rounds of each slot that are under way, or −1 where it has no room for another until they are read."""

    def launch(self, requests: Sequence[RoundRequest]) -> None:
        """Begin a round of these slots, behind those they have under way. Raises EngineError for one without room."""

    def read(self) -> FinishedRound:
        """The oldest round under way: its slots then hold all tokens before the last of their results."""

    def leave(self, slot: int) -> None:
        """Forget what was launched for the slot and not read."""


class Engine(Protocol):
    manifest: Manifest
    threads: int  # CPU threads it computes with; 1 on a GPU

    @property
    def buckets(self) -> Sequence[int] | None:
        """Tree tokens T that a verification is padded to, rising; None where it is not padded."""

    @property
    def rounds(self) -> DeviceRounds | None:
        """Rounds that stay on the device; None where the engine has none."""

    @property
    def mixes(self) -> bool:
        """Whether `verify` takes chunks of prompts beside trees; where it does not, `prefill` makes passes of them."""

    @property
    def inexact(self) -> str | None:
        """Why a row's results may have other bits in another pass; None where they never have."""

    def length(self, slot: int) -> int:
        """Committed tokens of the slot."""

    def draftable(self, slot: int, length: int) -> int:
        """The most of the first `length` committed tokens of which the drafter knows what it will see behind them."""

    def unseen(self, slot: int) -> int:
        """Committed tokens that the drafter has still to take in, at its next draft."""

    def restorable(self, slot: int, length: int) -> int:
        """The most of the first `length` tokens that `truncate` can keep. A network whose layers have states comes back
        to those only that it kept: where the last prompt ended, and at every so many tokens."""

    def truncate(self, slot: int, length: int) -> None:
        """Keep the first `length` tokens, or as many of them as are restorable; 0 empties the slot."""

    def prefill(self, slot: int, token_ids: NDArray[np.int64], *, rows: LogitRows, taps: bool) -> Verdict:
        """Append tokens [T] causally and commit them. `taps=False` when the slot will never be drafted for. The verdict
        has T rows for `all`, the last one for `last`, and no row for `none`."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft on top of every committed token, for all slots in the same passes: a block drafter's one is over
        [bonus, MASK × L]."""

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        """One target pass over each slot's tree; logits for all T nodes, or those asked for of a chunk."""

    def commit(self, slot: int, path: NDArray[np.int32], *, taps: bool) -> None:
        """Keep the nodes on `path` [m] (rising, root first) of the slot's last verified tree and forget the others."""

    def warm_up(self, progress: Progress = no_progress) -> None:
        """Do the one-time work of a single sequence's first passes. All slots must be empty, and are left empty."""

    def synchronize(self) -> None:
        """Wait until all started work is done. Only exact stage times need it."""

    def close(self) -> None:
        """Release the engine's memory and threads; a second call does nothing."""


KERNELS = "only on a GPU, in bf16 or fp16 and with heads of 64 or 128, do PyTorch engines run on our kernels"


def why_inexact(manifest: Manifest, *, kernels: bool = False, ranks: int = 1) -> str | None:
    """Why an engine is not exact; None where it is, as far as is known. `kernels`: whether PyTorch's runs on ours."""
    dims, backend = manifest.target_dims, BACKENDS[manifest.backend]
    if dims.experts is not None:
        return "in a mixture of experts an expert's product depends on how many rows choose it"
    if backend.on_cpu:
        return None
    if backend.plans:
        return "TensorRT chooses the order of its sums by the shapes of a plan"
    if dims.delta is not None:
        return "a hybrid's states are moved by the rows of a path at once, in another order than by single tokens"
    if ranks > 1:
        return "a split target's sums over ranks may have another order for passes of another size"
    return None if kernels else KERNELS
