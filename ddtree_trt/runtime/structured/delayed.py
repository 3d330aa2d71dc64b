"""Constraints that begin behind a text of the output, such as the end of a model's reasoning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.structured.matcher import GrammarMatcher, Mask, Matcher

_KEPT_MASKS = 8


class Opening:
    """A text behind which constraints begin, over a vocabulary: its first occurrence in a sequence of tokens. A state
    is how many bytes of the text the output ends with."""

    def __init__(self, text: str, token_bytes: Sequence[bytes]) -> None:
        """`token_bytes`: the bytes of every token of the vocabulary."""
        self._text = text.encode()
        self._bytes = token_bytes
        self._crossing = [token for token, raw in enumerate(token_bytes) if self._may_cross(raw)]

    def _may_cross(self, raw: bytes) -> bool:
        """Whether these bytes end the text behind some state, and have more behind it."""
        text, end = self._text, 0
        while end := raw.find(text[-1], end, -1) + 1:
            if raw[:end].endswith(text) or text.endswith(raw[:end]):
                return True
        return False

    def feed(self, state: int, token: int) -> tuple[int, bytes | None]:
        """The state behind a token, and, where the text is complete in it, the token's bytes behind the text, else
        None."""
        text, output = self._text, self._text[:state] + self._bytes[token]
        if (place := output.find(text)) >= 0:
            return 0, output[place + len(text) :]
        return next(size for size in range(min(len(text), len(output)), -1, -1) if output.endswith(text[:size])), None

    def crossing(self, state: int) -> list[tuple[int, bytes]]:
        """The tokens that end the text at a state and have more behind it, each with what it has there."""
        begun = self._text[:state]
        found = ((token, (begun + self._bytes[token]).partition(self._text)[2]) for token in self._crossing)
        return [(token, rest) for token, rest in found if rest]


class DelayedMatcher(Matcher):
    """A matcher that allows everything up to the end of its opening. A token that goes beyond the opening's end is
    allowed if the constraint allows what it has there."""

    def __init__(
        self, inner: GrammarMatcher, opening: Opening, vocab_size: int, token_of: Callable[[bytes], int | None]
    ) -> None:
        """`token_of`: the token with these bytes, if there is one."""
        self._inner = inner
        self._opening = opening
        self._vocab_size = vocab_size
        self._token_of = token_of
        self._place: int | None = 0  # the opening's state; None once the constraint has begun
        self._masks: dict[int, Mask] = {}  # by the opening's state

    @property
    def ended(self) -> bool:
        return self._place is None and self._inner.ended

    def allowed_length(self, path: Sequence[int]) -> int:
        opened, matcher, _ = self._opened(path)
        if matcher is None:
            return min(opened, len(path))
        rest = path[opened:]
        return opened + (matcher.allowed_length(rest) if rest else 0)

    def ends(self, behind: Sequence[int]) -> bool:
        opened, matcher, _ = self._opened(behind)
        return matcher is not None and (matcher.ended or matcher.ends(behind[opened:]))

    def mask(self, behind: Sequence[int] = ()) -> Mask:
        opened, matcher, place = self._opened(behind)
        if matcher is not None:
            return matcher.mask(behind[opened:])
        if place not in self._masks:
            while len(self._masks) >= _KEPT_MASKS:
                del self._masks[next(iter(self._masks))]
            self._masks[place] = self._mask_before(place)
        return self._masks[place].copy()

    def advance(self, token: int) -> None:
        if self._place is None:
            self._inner.advance(token)
            return
        self._place, rest = self._opening.feed(self._place, token)
        if rest is not None:
            self._place = None
            matcher = self._inner.behind_text(rest)
            if matcher is None:
                raise UsageError(f"structured: token {token} has behind the opening what the constraint does not allow")
            self._inner = matcher

    def _mask_before(self, place: int) -> Mask:
        mask = np.ones(self._vocab_size, bool)
        if crossing := self._opening.crossing(place):
            begins = self._inner.library_mask()
            for token, rest in crossing:
                same = self._token_of(rest)  # what is allowed of bytes is allowed of a token with them
                mask[token] = self._inner.behind_text(rest) is not None if same is None else begins[same]
        return mask

    def _opened(self, path: Sequence[int]) -> tuple[int, GrammarMatcher | None, int]:
        """How many tokens of the path lead to the opening's end, the matcher behind them, and the opening's state.
        Without an opening's end: all of them and None; where the constraint does not allow what the last of them has
        behind it: one less and None."""
        if self._place is None:
            return 0, self._inner, 0
        state = self._place
        for place, token in enumerate(path):
            state, rest = self._opening.feed(state, token)
            if rest is not None:
                matcher = self._inner.behind_text(rest)
                return place + (matcher is not None), matcher, state
        return len(path), None, state
