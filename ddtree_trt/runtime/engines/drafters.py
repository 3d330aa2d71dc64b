"""The drafter interface of all backends.

`Engine.commit` passes the committed tokens to the drafter, which may delay their pass until its next draft.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.errors import ArtifactError, EngineError
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, VerifyRequest
from ddtree_trt.runtime.engines.passes import SlotLengths

TAIL = 16  # most new rows of a slot in a pass that it shares


class Cached(Protocol):
    """A network and the cache of its slots."""

    @property
    def cache(self) -> SlotLengths:
        """The number of committed rows of each slot."""


class LanguageModel(Cached, Protocol):
    """A network with the target's inputs and outputs."""

    def extend(self, chains: Sequence[VerifyRequest]) -> Sequence[NDArray[np.float32]]:
        """Commit the rows of chains of distinct slots in one pass: of each its last logits [V], until the next pass."""


class Drafter(ABC):
    """The drafter of an engine, for all its slots; its kind's package has it."""

    @abstractmethod
    def context_length(self, slot: int) -> int:
        """Number of leading committed tokens that were passed to `append_context`."""

    def draftable(self, slot: int, length: int) -> int:
        """See `Engine.draftable`."""
        return min(length, self.context_length(slot))

    def unseen(self, slot: int) -> int:
        """Number of them whose passes wait for the next draft: 0, or about a round's, unless the kind says more."""
        return 0

    @abstractmethod
    def append_context(self, slot: int, token_ids: NDArray[np.int64], states: Any) -> None:
        """Take tokens [m] committed behind the known ones, with their tapped target states [m, M·H] if the kind has
        taps, in memory that the next target pass overwrites."""

    @abstractmethod
    def truncate(self, slot: int, length: int) -> None:
        """Keep the first `length` committed tokens, of which fewer may be known, and forget the others."""

    @abstractmethod
    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft behind the bonus token of each request, with all committed tokens of its slot as context. There is at
        least one request, the slots are distinct, and the drafts are in the requests' order."""

    def warm_up(self, slot: int, budget: int) -> None:
        """Capture passes of drafts of the slot alone, which holds a prompt, for budgets up to `budget`."""
        return  # those of others are captured at the first draft


def split(count: int, chunk: int, slots: int) -> list[slice]:
    """Parts of a slot's `count` new rows: the last is of the draft's first pass, the others have passes of their own.
    Passes over several slots may be padded to the longest part, which so is short."""
    last = (count - 1) // chunk * chunk
    starts = [*range(0, last + 1, chunk), *([count - 1] if slots > 1 and count - last > TAIL else [])]
    return [slice(start, end) for start, end in pairwise([*starts, count])]


def check_up_to_date(drafter: Drafter, target: SlotLengths, slot: int) -> None:
    """Raises EngineError when the drafter does not know all committed tokens of the slot; it may know more."""
    known, length = drafter.context_length(slot), target.lengths[slot]
    if known < length:
        raise EngineError(f"slot {slot} holds {length} tokens, the drafter was told of {known} of them")


class SlotCalls:
    """The calls of an engine that its target's cache and its drafter answer."""

    target: Cached
    drafter: Drafter

    def length(self, slot: int) -> int:
        return self.target.cache.lengths[slot]

    def draftable(self, slot: int, length: int) -> int:
        return self.drafter.draftable(slot, min(length, self.length(slot)))

    def unseen(self, slot: int) -> int:
        return self.drafter.unseen(slot)

    def restorable(self, slot: int, length: int) -> int:
        return self.target.cache.restorable(slot, length)

    def truncate(self, slot: int, length: int) -> None:
        self.target.cache.truncate(slot, length)
        self.drafter.truncate(slot, self.length(slot))

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Raises EngineError, before anything is drafted, where the drafter does not know every committed token of all
        the slots."""
        for request in requests:
            check_up_to_date(self.drafter, self.target.cache, request.slot)
        return self.drafter.draft(requests) if requests else []

    def release(self) -> None:
        """Forget both, and with them their memory."""
        for name in ("target", "drafter"):
            vars(self).pop(name, None)


def make_drafter(manifest: Manifest, *parts: Any) -> Drafter:
    """An engine's drafter, of what its backend gives to every kind. Raises ArtifactError for one it does not run."""
    kind, half = manifest.drafting, BACKENDS[manifest.backend].half
    if not kind.has(half):
        raise ArtifactError(f"engine {manifest.name!r} has an {kind.title}, which {half} engines do not run")
    drafter: Drafter = kind.load(half)(manifest, *parts)
    return drafter
