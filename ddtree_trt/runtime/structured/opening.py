"""The text behind which a constraint begins, such as the end of a model's reasoning."""

from __future__ import annotations

from collections.abc import Sequence


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
