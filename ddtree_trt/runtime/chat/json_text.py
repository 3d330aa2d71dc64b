"""JSON read in pieces: each character once, and refused at the first one that JSON cannot have there."""

from __future__ import annotations

import json
import re
from typing import Any

SPACE = " \t\r\n"
_KEY, _VALUE = '"', '"{[-0123456789tfn'  # how each may begin
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # of a string, up to its end or an escape
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{0,3})?")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_MOST_DEPTH = 256  # nested deeper it is no value: those who get it, Python's parser among them, have limits too


class Malformed(Exception):
    """The text is not what was to be read."""


class JsonText:
    """One JSON value whose text arrives in pieces. `done` when it is whole: the texts that it reads are those of
    `json.loads`, but for NaN and infinities, which JSON lacks, and deeper nesting than any value needs."""

    def __init__(self) -> None:
        self.done = False
        self._open: list[str] = []  # the brackets that close what is open
        self._allowed = _VALUE  # characters that may come next, white space aside
        self._in_string = False
        self._is_key = False  # the string
        self._escape = ""  # an escape that has begun
        self._word: list[str] | None = None  # the pieces of a number, true, false or null

    def read(self, text: str, at: int) -> int:
        """Read on from `text[at]`; returns the index behind what was read, the end of `text` unless the value ends
        before it. Raises Malformed."""
        while at < len(text) and not self.done:
            if self._in_string:
                at = self._string(text, at)
            elif self._word is not None:
                at = self._scalar(text, at)
            else:
                at = self._structure(text, at)
        return at

    def _structure(self, text: str, at: int) -> int:
        char = text[at]
        if char in SPACE:
            return at + 1
        if char not in self._allowed:
            raise Malformed
        if char == '"':
            self._in_string = True
            self._is_key = "{" not in self._allowed
        elif char in "{[":
            if len(self._open) == _MOST_DEPTH:
                raise Malformed
            self._open.append("}" if char == "{" else "]")
            self._allowed = (_KEY if char == "{" else _VALUE) + self._open[-1]
        elif char in "}]":
            self._open.pop()
            self._value_ends()
        elif char == ":":
            self._allowed = _VALUE
        elif char == ",":
            self._allowed = _KEY if self._open[-1] == "}" else _VALUE
        else:
            self._word = []
            return at
        return at + 1

    def _string(self, text: str, at: int) -> int:
        if not self._escape:
            at = _end(_PLAIN, text, at)
            if at == len(text):
                return at
            if text[at] == '"':
                self._in_string = False
                if self._is_key:
                    self._allowed = ":"
                else:
                    self._value_ends()
                return at + 1
        self._escape += text[at]
        if _ESCAPE.fullmatch(self._escape):
            self._escape = ""
        elif not _BEGUN_ESCAPE.fullmatch(self._escape):
            raise Malformed
        return at + 1

    def _scalar(self, text: str, at: int) -> int:
        assert self._word is not None
        end = _end(_WORD, text, at)
        self._word.append(text[at:end])
        if end < len(text):
            if not _SCALAR.fullmatch("".join(self._word)):
                raise Malformed
            self._word = None
            self._value_ends()
        return end

    def _value_ends(self) -> None:
        self.done = not self._open
        self._allowed = "," + self._open[-1] if self._open else ""


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None
    return match.end()


def parse(text: str) -> Any:
    """The value of a JSON text that `JsonText` reads. Raises Malformed."""
    JsonText().read(text + " ", 0)  # a space ends a number
    try:
        return json.loads(text)
    except ValueError:
        raise Malformed from None
