"""Reading the text of an answer, whole or as it is written: reasoning, content and calls of tools."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")
THINK, END_OF_THINKING = "<think>", "</think>"
_SPACE = re.compile(r"[ \t\r\n]*")

# How an answer begins: without reasoning, within it, or with reasoning where it opens a block for it.
Thinking = Literal["never", "open", "possible"]
# A reading that can be interrupted: it yields where it needs text that has not arrived, and returns what it read.
Steps = Generator[None, None, T]


@dataclass(frozen=True)
class Reasoning:
    """The next part of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class Content:
    """The next part of what it says."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; `index` counts the calls of a message from 0, `arguments` is the text of a JSON object."""

    index: int
    id: str
    name: str
    arguments: str

    def to_dict(self) -> dict[str, Any]:
        """The call as OpenAI's API has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


Event = Reasoning | Content | ToolCall


@dataclass
class ChatMessage:
    """An answer by its parts.

    Attributes:
        content: what the model says to the user; None where it only reasons or calls tools.
        reasoning_content: what it thought before; None where the answer has no such part.
        tool_calls: the calls of tools, in its order.
    """

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> ChatMessage:
        events = list(events)
        content = "".join(event.text for event in events if isinstance(event, Content))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls = [event for event in events if isinstance(event, ToolCall)]
        return cls(content or (None if reasoning or calls else ""), reasoning or None, calls)

    def to_dict(self) -> dict[str, Any]:
        """The message as OpenAI's API has it, to be put behind the others of its chat."""
        calls = [call.to_dict() for call in self.tool_calls]
        parts = {"reasoning_content": self.reasoning_content, "tool_calls": calls}
        return {"role": "assistant", "content": self.content, **{name: part for name, part in parts.items() if part}}


class Malformed(Exception):
    """The text is no call. `content`: how many characters of the unread text belong to none; None: its opening."""

    def __init__(self, content: int | None = None) -> None:
        self.content = content


class Unread:
    """The text that has arrived and was not taken yet; places in it are counted from its beginning."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False

    def take(self, size: int) -> str:
        taken, self.text = self.text[:size], self.text[size:]
        return taken

    def more(self) -> Steps[bool]:
        """Wait for more text; False at the end."""
        size = len(self.text)
        while len(self.text) == size and not self.ended:
            yield
        return len(self.text) > size

    def char(self, at: int) -> Steps[str]:
        """The character at a place; empty behind the end."""
        while len(self.text) <= at and (yield from self.more()):
            pass
        return self.text[at : at + 1]

    def space(self, at: int) -> Steps[int]:
        """The place behind white space, if any."""
        while (match := _SPACE.match(self.text, at)) and match.end() == len(self.text) and (yield from self.more()):
            at = match.end()
        return match.end() if match else at

    def begins(self, literal: str, at: int) -> Steps[bool]:
        while len(self.text) - at < len(literal) and literal.startswith(self.text[at:]):
            if not (yield from self.more()):
                return False
        return self.text.startswith(literal, at)

    def find(self, pattern: re.Pattern[str], at: int, longest: int) -> Steps[re.Match[str]]:
        """The first match of at most `longest` characters. Raises Malformed, with all text, where there is none."""
        while (found := pattern.search(self.text, at)) is None:
            at = max(at, len(self.text) - longest + 1)
            if not (yield from self.more()):
                raise Malformed(len(self.text))
        return found

    def until(self, marks: tuple[str, ...], sink: Callable[[str], None]) -> Steps[str]:
        """Pass the text before the first of the marks to `sink` as far as it is certain. Returns the mark, with which
        the text then begins, or empty at the end."""
        while (found := _any_of(marks).search(self.text)) is None:
            sizes = range(min(len(self.text), max(map(len, marks), default=1) - 1), 0, -1)
            begun = next((n for n in sizes if any(m.startswith(self.text[-n:]) for m in marks)), 0)
            sink(self.take(len(self.text) - begun))
            if not (yield from self.more()):
                sink(self.take(begun))
                return ""
        sink(self.take(found.start()))
        return found.group()


class ToolFormat(Protocol):
    """How a family of models writes calls of tools."""

    def read(self, reader: MessageReader) -> Steps[None]:
        """Read an answer to its end: its calls by `reader.call`, all else by `reader.content`."""


class MessageReader:
    """Reads one answer, given piece by piece; what it finds does not depend on how the text was divided.

    A call is held until it is whole, when it is known to be well-formed; a text that looks like one and is not is
    content. A reading that fails ends at the first character that cannot belong to a call, so that few openings of
    calls are read by more than one, and the work is proportional to the text's length, whatever the text.
    """

    def __init__(self, thinking: Thinking, tools: ToolFormat | None, *, parallel: bool = True) -> None:
        """`tools`: None leaves calls in the content. Not `parallel`: calls behind the first are left out."""
        self.unread = Unread()
        self.calls = 0
        self._thinking = thinking
        self._tools = tools
        self._parallel = parallel
        self._found: list[Event] = []
        self._said = False  # any content
        self._blank = ""  # white space that is content if more follows
        self._reading = self._read()

    def push(self, text: str) -> list[Event]:
        """Add the next piece of the text; returns what it says."""
        self.unread.text += text
        return self._step()

    def end(self) -> list[Event]:
        """What is known at the end of the text only."""
        self.unread.ended = True
        return self._step()

    def _step(self) -> list[Event]:
        next(self._reading, None)
        found, self._found = self._found, []
        return found

    def _read(self) -> Steps[None]:
        if self._thinking != "never":
            yield from self._read_reasoning()
        if self._tools is not None:
            yield from self._tools.read(self)
        else:
            yield from self.unread.until((), self.content)
        if not self.calls:
            self._say(self._blank)

    def _read_reasoning(self) -> Steps[None]:
        """Read the reasoning, without the line breaks that templates put at its ends and behind it."""
        unread, breaks = self.unread, ""
        at = yield from unread.space(0)
        if (yield from unread.begins(THINK, at)):
            at += len(THINK)
        elif self._thinking == "possible":
            return
        unread.take(at)

        def think(text: str) -> None:
            nonlocal breaks
            kept = text.rstrip("\n")
            if kept:
                self._add(Reasoning(breaks + kept))
            breaks = ("" if kept else breaks) + text[len(kept) :]

        yield from self._line_breaks()
        unread.take(len((yield from unread.until((END_OF_THINKING,), think))))
        yield from self._line_breaks()

    def _line_breaks(self) -> Steps[None]:
        while (yield from self.unread.begins("\n", 0)):
            self.unread.take(1)

    def content(self, text: str) -> None:
        """Add content. White space around calls is none."""
        if self._tools is None:
            self._say(text)
        elif kept := text.rstrip():
            before = self._blank + kept
            self._say(before.lstrip() if self.calls and not self._said else before)
            self._blank = text[len(kept) :]
        else:
            self._blank += text

    def _say(self, text: str) -> None:
        if text:
            self._said = True
            self._add(Content(text))

    def _add(self, event: Reasoning | Content) -> None:
        """Add an event to those found, as one with its neighbour of the same kind."""
        last = self._found[-1] if self._found else None
        if isinstance(last, Reasoning | Content) and type(last) is type(event):
            self._found[-1] = type(event)(last.text + event.text)
        else:
            self._found.append(event)

    def call(self, opening: int, read: Callable[[int], Steps[tuple[str, str, int]]]) -> Steps[bool]:
        """Read a call; returns whether it is one. `read`, given the place behind the `opening`, returns name, arguments
        and the place behind the call. Where it is none, the opening is content, and the rest is still to be read."""
        try:
            name, arguments, end = yield from read(opening)
        except Malformed as malformed:
            self.content(self.unread.take(malformed.content or opening))
            return False
        self.unread.take(end)
        if self._parallel or not self.calls:
            self._found.append(ToolCall(self.calls, f"call_{uuid.uuid4().hex[:24]}", name, arguments))
        self.calls += 1
        return True


def read_message(text: str, thinking: Thinking, tools: ToolFormat | None, *, parallel: bool = True) -> ChatMessage:
    reader = MessageReader(thinking, tools, parallel=parallel)
    return ChatMessage.of(reader.push(text) + reader.end())


@cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)) or "(?!)")
