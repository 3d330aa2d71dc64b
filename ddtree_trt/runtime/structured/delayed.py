"""Constraints that begin behind a text of the output, such as the end of a model's reasoning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.structured.matcher import GrammarMatcher, Mask, Matcher


class Opening:
    """A text behind which constraints begin, over a vocabulary: its first occurrence in a sequence of tokens."""

    def __init__(self, text: str, token_bytes: Sequence[bytes]) -> None:
        """`token_bytes`: the bytes of every token of the vocabulary."""
        self._text = text.encode()
        self._bytes = token_bytes
        ends = [self._text[i:] for i in range(len(self._text))]
        self.crossing = [  # tokens that may have the text's end and more behind it
            token
            for token, raw in enumerate(token_bytes)
            if any(raw.startswith(end) and len(raw) > len(end) for end in ends) or self._text in raw
        ]

    def feed(self, tail: bytes, token: int) -> tuple[bytes, bytes | None]:
        """A token behind `tail`, the last bytes that may begin the text: the new tail, and, where the text is complete
        now, the token's bytes behind it, else None."""
        seen = tail + self._bytes[token]
        at = seen.find(self._text)
        if at >= 0:
            return b"", seen[at + len(self._text) :]
        return seen[-(len(self._text) - 1) :] if len(self._text) > 1 else b"", None


class DelayedMatcher(Matcher):
    """A matcher that allows everything up to the end of its opening. A token that goes beyond the opening's end is
    allowed if the constraint allows what it has there."""

    def __init__(self, inner: GrammarMatcher, opening: Opening, vocab_size: int) -> None:
        self._inner = inner
        self._opening = opening
        self._vocab_size = vocab_size
        self._tail: bytes | None = b""  # None once the constraint has begun

    @property
    def ended(self) -> bool:
        return self._tail is None and self._inner.ended

    def allowed_length(self, path: Sequence[int]) -> int:
        opened, matcher = self._opened(path)
        if matcher is None:
            return min(opened, len(path))
        rest = path[opened:]
        return opened + (matcher.allowed_length(rest) if rest else 0)

    def ends(self, behind: Sequence[int]) -> bool:
        opened, matcher = self._opened(behind)
        return matcher is not None and (matcher.ended or matcher.ends(behind[opened:]))

    def mask(self, behind: Sequence[int] = ()) -> Mask:
        opened, matcher = self._opened(behind)
        if matcher is not None:
            return matcher.mask(behind[opened:])
        mask = np.ones(self._vocab_size, bool)
        for token in self._opening.crossing:
            mask[token] = self.allows(token, behind)
        return mask

    def advance(self, token: int) -> None:
        if self._tail is None:
            self._inner.advance(token)
            return
        self._tail, rest = self._opening.feed(self._tail, token)
        if rest is not None:
            self._tail = None
            matcher = self._inner.behind_text(rest)
            if matcher is None:
                raise UsageError(f"structured: token {token} has behind the opening what the constraint does not allow")
            self._inner = matcher

    def _opened(self, path: Sequence[int]) -> tuple[int, GrammarMatcher | None]:
        """How many tokens of the path lead to the opening's end, and the matcher behind them. Without an opening's end:
        all of them and None; where the constraint does not allow what the last of them has behind it: one less and
        None."""
        if self._tail is None:
            return 0, self._inner
        tail = self._tail
        for place, token in enumerate(path):
            tail, rest = self._opening.feed(tail, token)
            if rest is not None:
                matcher = self._inner.behind_text(rest)
                return place + (matcher is not None), matcher
        return len(path), None
