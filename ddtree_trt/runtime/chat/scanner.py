"""A scanner of text that is still being written: generators that read it, and wait where more is needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import cache
from typing import TypeVar

from ddtree_trt.runtime.chat.json_text import SPACE, JsonText, Malformed, parse

T = TypeVar("T")
# A reading that can be interrupted: it yields where it needs text that has not arrived, and returns what it read.
Steps = Generator[None, None, T]
Sink = Callable[[str], None]


class Scanner:
    """The text that has arrived and the place up to which it has been read.

    Every reading gives the same results however the text is divided into pieces. A piece is copied when it arrives and
    once more when it has been read, however much has arrived before: what may have to be read again is kept apart.
    """

    def __init__(self) -> None:
        self.text = ""  # what is unread, behind the rest of the last pieces
        self.at = 0  # index of the next character to read
        self.ended = False
        self._arrived = 0  # characters
        self._kept: list[str] | None = None  # what was read since `keep`, but for that which is in `text`
        self._kept_from = 0  # index in `text` of what follows it

    @property
    def place(self) -> int:
        """How many characters stand before the next one to read, from the beginning of the whole text."""
        return self._arrived - len(self.text) + self.at

    def add(self, piece: str) -> None:
        if self._kept is not None:
            self._kept.append(self.text[self._kept_from : self.at])
            self._kept_from = 0
        self.text, self.at = self.text[self.at :] + piece, 0
        self._arrived += len(piece)

    def keep(self) -> None:
        """Keep what is read from here on, until `rewind` or `release`."""
        self._kept, self._kept_from = [], self.at

    def rewind(self) -> None:
        """Have what was kept still to be read."""
        kept = "".join(self._kept or ())
        self.text, self.at = kept + self.text if kept else self.text, 0 if kept else self._kept_from
        self.release()

    def release(self) -> None:
        """Forget what was kept."""
        self._kept = None

    def more(self) -> Steps[bool]:
        """Wait for more text; False at the end."""
        before = self._arrived
        while self._arrived == before and not self.ended:
            yield
        return self._arrived > before

    def peek(self) -> Steps[str]:
        """The next character, which stays unread; empty at the end."""
        while self.at == len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def space(self) -> Steps[str]:
        """Read white space, if any."""
        found = ""
        while (char := (yield from self.peek())) and char in SPACE:
            self.at += 1
            found += char
        return found

    def accept(self, literal: str) -> Steps[bool]:
        """Read `literal` if the text goes on with it; otherwise nothing is read."""
        while len(self.text) - self.at < len(literal):
            if not literal.startswith(self.text[self.at :]) or not (yield from self.more()):
                return False
        if not self.text.startswith(literal, self.at):
            return False
        self.at += len(literal)
        return True

    def expect(self, literal: str) -> Steps[None]:
        """Read `literal`. Raises Malformed where the text goes on otherwise."""
        if not (yield from self.accept(literal)):
            raise Malformed

    def until(self, marks: tuple[str, ...], sink: Sink) -> Steps[str]:
        """Pass the text before the first of the marks to `sink` as far as it is certain; the mark is read and returned,
        or empty at the end."""
        while True:
            found = _any_of(marks).search(self.text, self.at)
            # A mark that begins before it may still be arriving.
            if found and self._begun(marks, found.start()) == found.start():
                sink(self.text[self.at : found.start()])
                self.at = found.end()
                return found.group()
            certain = self._begun(marks, len(self.text))
            sink(self.text[self.at : certain])
            self.at = certain
            if not (yield from self.more()):
                sink(self.text[self.at :])
                self.at = len(self.text)
                return ""

    def _begun(self, marks: tuple[str, ...], end: int) -> int:
        """The place before `end` where a mark begins that the text's end cuts; `end` where there is none."""
        for place in range(max(self.at, len(self.text) - max(map(len, marks), default=1) + 1), end):
            if any(m.startswith(self.text[place:]) for m in marks):
                return place
        return end

    def json_value(self, sink: Sink) -> Steps[None]:
        """Read a JSON value, its text passed to `sink` as it arrives. Raises Malformed at the first character that no
        such value has there, and where the text ends before it does."""
        value = JsonText()
        while True:
            end = value.read(self.text, self.at)
            sink(self.text[self.at : end])
            self.at = end
            if value.done:
                return
            if not (yield from self.more()):
                raise Malformed

    def json_string(self) -> Steps[str]:
        """Read a JSON string; returns the text that it stands for. Raises Malformed for anything else, and for a text
        that no answer could hold: an escape may be half of a character."""
        if (yield from self.peek()) != '"':
            raise Malformed
        pieces: list[str] = []
        yield from self.json_value(pieces.append)
        text = str(parse("".join(pieces)))
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Malformed from None
        return text

    def braces(self, sink: Sink) -> Steps[None]:
        """Read from a brace to the one that closes it, whatever is between but for brackets in JSON strings, passed to
        `sink` as it arrives. Raises Malformed where the text ends before."""
        depth, quoted, escaped = 0, False, False
        while True:
            for place in range(self.at, len(self.text)):
                char = self.text[place]
                if escaped:
                    escaped = False
                elif quoted:
                    escaped, quoted = char == "\\", char != '"'
                elif char == '"':
                    quoted = True
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                    if not depth:
                        sink(self.text[self.at : place + 1])
                        self.at = place + 1
                        return
            sink(self.text[self.at :])
            self.at = len(self.text)
            if not (yield from self.more()):
                raise Malformed


@cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of the marks; of those that begin at one place the longest."""
    return re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)) or "(?!)")
