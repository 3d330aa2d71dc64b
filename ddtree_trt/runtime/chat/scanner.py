"""A scanner of text that is still being written: generators that read it, and wait where more is needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
# A reading that can be interrupted: it yields where it needs text that has not arrived, and returns what it read.
Steps = Generator[None, None, T]
Sink = Callable[[str], None]
_SPACE = " \t\r\n"


class Malformed(Exception):
    """The text is not what was to be read."""


class Scanner:
    """The text that has arrived and the place up to which it has been read.

    Every reading gives the same results however the text is divided into pieces.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # index of the next character to read
        self.ended = False
        self._arrived = 0  # characters

    def add(self, piece: str) -> None:
        self.text += piece
        self._arrived += len(piece)

    def forget(self) -> None:
        """Drop what has been read. Not while something is read that may turn out to be malformed."""
        self.text, self.at = self.text[self.at :], 0

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
        while (char := (yield from self.peek())) and char in _SPACE:
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

    def until(self, marks: Sequence[str], sink: Sink) -> Steps[str]:
        """Pass the text before the first of the marks to `sink` as far as it is certain; the mark is read and returned,
        or empty at the end."""
        while True:
            found = [(place, -len(m), m) for m in marks if (place := self.text.find(m, self.at)) >= 0]
            if found:
                place, _, mark = min(found)
                # A mark that begins before it may still be arriving.
                if self._begun(marks, place) == place:
                    sink(self.text[self.at : place])
                    self.at = place + len(mark)
                    return mark
            certain = self._begun(marks, len(self.text))
            sink(self.text[self.at : certain])
            self.at = certain
            if not (yield from self.more()):
                sink(self.text[self.at :])
                self.at = len(self.text)
                return ""

    def _begun(self, marks: Sequence[str], end: int) -> int:
        """The place before `end` where a mark begins that the text's end cuts; `end` where there is none."""
        for place in range(max(self.at, len(self.text) - max(map(len, marks), default=1) + 1), end):
            if any(m.startswith(self.text[place:]) for m in marks):
                return place
        return end

    def json_object(self, sink: Sink) -> Steps[None]:
        """Read a JSON object from its brace to the one that closes it, its text passed to `sink` as it arrives.

        Raises Malformed where none begins here, it does not end, or what was passed is not JSON.
        """
        if (yield from self.peek()) != "{":
            raise Malformed
        start, depth, quoted, escaped = self.at, 0, False, False
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
                        parse(self.text[start : self.at])
                        return
            sink(self.text[self.at :])
            self.at = len(self.text)
            if not (yield from self.more()):
                raise Malformed

    def json_value(self) -> Steps[Any]:
        """Read a JSON value. Raises Malformed for anything else."""
        start, first = self.at, (yield from self.peek())
        if first == "{":
            yield from self.json_object(lambda _: None)
        elif first == "[":
            raise Malformed  # no call of a tool has a list beside its arguments
        elif first == '"':
            self.at += 1
            while (char := (yield from self.peek())) != '"':
                self.at += 1
                if char == "\\" and (yield from self.peek()):
                    self.at += 1
                if not char:
                    raise Malformed
            self.at += 1
        else:
            while (char := (yield from self.peek())) and char not in ",}" + _SPACE:
                self.at += 1
        return parse(self.text[start : self.at])


def parse(text: str) -> Any:
    """The value of a JSON text. Raises Malformed."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise Malformed from None


def _refuse(name: str) -> Any:
    raise ValueError(f"JSON has no {name}")
