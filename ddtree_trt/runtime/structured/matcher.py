"""The matcher of one sequence: which tokens may come next, advanced by every emitted token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.errors import UsageError
from ddtree_trt.reading import printable

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = NDArray[np.bool_]  # [V]


class Matcher:
    """Holds a sequence to its constraint. Only `advance` changes it.

    `behind` in what follows: tokens between the output and the place asked about, for a look ahead.
    """

    def __init__(
        self, state: LLMatcher, vocab_size: int, ending: frozenset[int], banned: frozenset[int] = frozenset()
    ) -> None:
        """`state` is changed by `advance`. `ending`: tokens that end the output, allowed where the text is complete;
        `banned`: tokens that are never allowed."""
        self.ended = False  # whether nothing can follow
        self._state = state
        self._vocab_size = vocab_size
        self._ending = ending
        self._no_text = ending | banned
        self._ending_ids, self._banned_ids = (
            np.array(sorted(t for t in ids if t < vocab_size), np.int64) for ids in (ending, banned)
        )

    def allows(self, token: int, behind: Sequence[int] = ()) -> bool:
        """Whether the token may be next. False at a place that cannot be reached."""
        path = [*behind, token]
        return self.allowed_length(path) == len(path)

    def allowed_length(self, path: Sequence[int]) -> int:
        """How many tokens of the path may follow the output, one after the other."""
        end = next((i for i, token in enumerate(path) if token in self._no_text), None)
        allowed = self._state.validate_tokens(list(path[:end]))
        if end is None or allowed < end or path[end] not in self._ending:
            return allowed
        complete = self._state.is_accepting() if end == 0 else self._at(path[:end]).is_accepting()
        return allowed + complete

    def ends(self, behind: Sequence[int]) -> bool:
        """Whether nothing can follow these tokens."""
        return bool(behind) and (behind[-1] in self._ending or self._at(behind).is_stopped())

    def mask(self, behind: Sequence[int] = ()) -> Mask:
        """The tokens that may be next, bool [V]. Raises UsageError where there are none, or finding them is too much
        work."""
        state = self._at(behind)
        bits = np.frombuffer(state.compute_bitmask(), np.uint8)
        self._check(state)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(bool)
        mask[self._banned_ids] = False
        mask[self._ending_ids] = state.is_accepting()
        if not mask.any():
            raise UsageError("structured: no token of the model's vocabulary continues the output")
        return mask

    def advance(self, token: int) -> None:
        """Take an emitted token. Raises UsageError for one that is not allowed."""
        if token in self._ending:
            self.ended = True
            return
        if not self._state.consume_token(token):
            self._check(self._state)
        self.ended = self._state.is_stopped()

    def _at(self, behind: Sequence[int]) -> LLMatcher:
        if not behind:
            return self._state
        state = self._state.deep_copy()
        state.consume_tokens(list(behind))
        self._check(state)
        return state

    @staticmethod
    def _check(state: LLMatcher) -> None:
        if state.is_error():
            reason = printable(" ".join(state.get_error().split()))
            raise UsageError(f"structured: the output could not be matched: {reason[:400]}")
