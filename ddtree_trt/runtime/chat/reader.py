"""Reading the text of an answer, whole or as it is written: reasoning, content and calls of tools."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Literal, Protocol

from ddtree_trt.runtime.chat.events import (
    CallArguments,
    CallBegin,
    ChatMessage,
    Content,
    Event,
    Reasoning,
    joined,
)
from ddtree_trt.runtime.chat.json_text import Malformed
from ddtree_trt.runtime.chat.scanner import Scanner, Steps

THINK, END_OF_THINKING = "<think>", "</think>"

# How an answer begins: without reasoning, within it, or with reasoning where it opens a block for it.
Thinking = Literal["never", "open", "possible"]


class ToolFormat(Protocol):
    """How a family of models writes calls of tools."""

    def read(self, reader: MessageReader) -> Steps[None]:
        """Read an answer to its end: its calls by `reader.call`, all else by `reader.content`."""


class CallWriter:
    """Takes one call as it is read. From `begin` on the call is well-formed as far as its arguments go."""

    def __init__(self, index: int, write: Callable[[Event], None], live: bool) -> None:
        self.begun = False
        self._index = index
        self._write = write
        self._live = live

    @property
    def sent(self) -> bool:
        """Whether the call's beginning has been sent, so that it stays a call whatever follows."""
        return self.begun and self._live

    def begin(self, name: str) -> None:
        self.begun = True
        self._write(CallBegin(self._index, f"call_{uuid.uuid4().hex[:24]}", name))

    def arguments(self, text: str) -> None:
        if text:
            self._write(CallArguments(self._index, text))


class MessageReader:
    """Reads one answer, given piece by piece; what it finds does not depend on how the text was divided.

    A call is a call from its end on, when it is known to be well-formed; a text that looks like one and is not is
    content. With `live` a call is one as soon as its name and the beginning of its arguments have been read, and its
    arguments follow as they are written: if they turn out not to be JSON, they have been sent.

    The time it takes is proportional to the text's length, whatever the text: a reading that fails ends at the first
    character that cannot belong to a call, so that few openings of calls are read by more than one.
    """

    def __init__(
        self, thinking: Thinking, tools: ToolFormat | None, *, live: bool = False, parallel: bool = True
    ) -> None:
        """`tools`: None leaves calls in the content. Not `parallel`: calls behind the first are left out."""
        self.scanner = Scanner()
        self.calls = 0
        self._thinking = thinking
        self._tools = tools
        self._live = live
        self._parallel = parallel
        self._found: list[Event] = []
        self._said = False  # any content
        self._blank: list[str] = []  # white space that is content if more follows
        self._reading = self._read()

    def push(self, text: str) -> list[Event]:
        """Add the next piece of the text; returns what it says."""
        self.scanner.add(text)
        return self._step()

    def end(self) -> list[Event]:
        """What is known at the end of the text only."""
        self.scanner.ended = True
        return self._step()

    def _step(self) -> list[Event]:
        next(self._reading, None)
        found, self._found = self._found, []
        return joined(found)

    def _read(self) -> Steps[None]:
        yield  # for the first piece
        yield from self._read_reasoning()
        if self._tools is not None:
            yield from self._tools.read(self)
        else:
            yield from self.scanner.until((), self.content)
        if not self.calls:
            self._say("".join(self._blank))

    def _read_reasoning(self) -> Steps[None]:
        """Read the reasoning, without the line breaks that templates put at its ends and behind it."""
        if self._thinking == "never":
            return
        scanner = self.scanner
        space = yield from scanner.space()
        if not (yield from scanner.accept(THINK)) and self._thinking == "possible":
            self.content(space)
            return
        yield from self._line_breaks()
        held: list[str] = []

        def think(text: str) -> None:
            kept = text.rstrip("\n")
            if kept:
                self._found.append(Reasoning("".join(held) + kept))
                held.clear()
            held.append(text[len(kept) :])

        if (yield from scanner.until((END_OF_THINKING,), think)):
            yield from self._line_breaks()

    def _line_breaks(self) -> Steps[None]:
        while (yield from self.scanner.accept("\n")):
            pass

    def content(self, text: str) -> None:
        """Add content. White space around calls is none."""
        if self._tools is None:
            self._say(text)
            return
        kept = text.rstrip()
        if kept:
            before = "".join(self._blank) + kept
            self._say(before.lstrip() if self.calls and not self._said else before)
            self._blank.clear()
        self._blank.append(text[len(kept) :])

    def _say(self, text: str) -> None:
        if text:
            self._said = True
            self._found.append(Content(text))

    def call(self, before: str, read: Callable[[CallWriter], Steps[None]]) -> Steps[bool]:
        """Read a call; returns whether it is one. Where it is not, `before`, which was read in front of it, is content,
        and what follows is still to be read."""
        index = self.calls
        kept: list[Event] = []
        left_out = index > 0 and not self._parallel

        def write(event: Event) -> None:
            if not left_out:
                (self._found if self._live else kept).append(event)

        call = CallWriter(index, write, self._live)
        self.scanner.keep()
        try:
            yield from read(call)
        except Malformed:
            if not call.sent:
                self.scanner.rewind()
                self.content(before)
                return False
        self.scanner.release()
        self._found += kept
        self.calls += 1
        return True


def read_message(text: str, thinking: Thinking, tools: ToolFormat | None, *, parallel: bool = True) -> ChatMessage:
    """The message that a whole answer makes."""
    reader = MessageReader(thinking, tools, parallel=parallel)
    return ChatMessage.of(reader.push(text) + reader.end())
