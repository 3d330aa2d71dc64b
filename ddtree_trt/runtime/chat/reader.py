"""Reading the text of an answer, whole or as it is written: reasoning, content and calls of tools."""

import re
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from ddtree_trt.runtime.chat.calls import Incomplete, Malformed, ToolFormat

THINK, END_OF_THINKING = "<think>", "</think>"

# How an answer begins: without reasoning, within it, or with reasoning where it opens a block for it.
Thinking = Literal["never", "open", "possible"]


@dataclass(frozen=True)
class Text:
    """The next part of what the model thinks before it answers, or of what it says: of a field of its message."""

    field: Literal["reasoning_content", "content"]
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


Event = Text | ToolCall


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
    def of(cls, events: Iterable[Event]) -> Self:
        texts, calls = {"content": "", "reasoning_content": ""}, list[ToolCall]()
        for event in events:
            if isinstance(event, Text):
                texts[event.field] += event.text
            else:
                calls.append(event)
        content, reasoning = texts.values()
        return cls(content or (None if reasoning or calls else ""), reasoning or None, calls)

    def to_dict(self) -> dict[str, Any]:
        """The message as OpenAI's API has it, to be put behind the others of its chat."""
        calls = [call.to_dict() for call in self.tool_calls]
        parts = {"reasoning_content": self.reasoning_content, "tool_calls": calls}
        return {"role": "assistant", "content": self.content, **{name: part for name, part in parts.items() if part}}


class MessageReader:
    """Reads one answer, given piece by piece; what it finds does not depend on how the text was divided.

    A call is held until it is whole, when it is known to be well-formed; a text that looks like one and is not is
    content.
    """

    def __init__(self, thinking: Thinking, tools: ToolFormat | None, *, parallel: bool = True) -> None:
        """`tools`: None leaves calls in the content. Not `parallel`: calls behind the first are left out."""
        self.calls = 0
        self._tools = tools
        self._parallel = parallel
        self._part: Literal["reasoning", "answer"] | Thinking = "answer" if thinking == "never" else thinking
        self._unread = ""
        self._looked = 0  # up to where a call's end was not found
        self._found: list[Event] = []
        self._said = False  # any content
        self._blank = ""  # white space that is of the text if more follows
        self._dropped: str | None = ""  # the characters that are not, where the next text begins; None: white space

    def push(self, text: str) -> list[Event]:
        """Add the next piece of the text; returns what it says."""
        self._unread += text
        return self._read(ended=False)

    def end(self) -> list[Event]:
        """What is known at the end of the text only."""
        return self._read(ended=True)

    def _read(self, *, ended: bool) -> list[Event]:
        self._found = []
        if self._part in ("open", "possible"):
            self._begin(ended)
        if self._part == "reasoning":
            text, mark = self._until((END_OF_THINKING,), ended)
            self._say("reasoning_content", text, "\n")  # templates put line breaks at its ends and behind it
            if mark:
                self._take(len(mark))
                self._part, self._blank, self._dropped = "answer", "", "\n"
        if self._part == "answer":
            if self._tools is None:
                self._say("content", self._take(len(self._unread)), "")
            else:
                self._answer(self._tools, ended)
            if ended and self._blank and not self.calls:
                self._add(Text("content", self._blank))
        return self._found

    def _begin(self, ended: bool) -> None:
        text = self._unread.lstrip(" \t\r\n")
        if text != THINK and THINK.startswith(text) and not ended:
            return
        if text.startswith(THINK) or self._part == "open":
            self._unread, self._part, self._dropped = text.removeprefix(THINK), "reasoning", "\n"
        else:
            self._part = "answer"

    def _answer(self, tools: ToolFormat, ended: bool) -> None:
        while self._unread:
            text, mark = "", ""
            if not (tools.bare and not self._said and self._unread.lstrip()[:1] in ("", "{")):
                text, mark = self._until(tools.marks, ended)
                self._say("content", text, None)
                if not mark:
                    return
            end = tools.marks.get(mark)
            try:
                if not (ended or (end and self._unread.find(end, self._looked) >= 0)):
                    raise Incomplete
                calls, size = tools.calls(self._unread, mark, ended=ended)
            except Incomplete:
                self._looked = max(0, len(self._unread) - len(end or "") + 1)
                return
            except Malformed as malformed:
                self._say("content", self._take(malformed.content or len(mark)), None)
            else:
                self._take(size)
                for name, arguments in calls:
                    if self._parallel or not self.calls:
                        self._found.append(ToolCall(self.calls, f"call_{uuid.uuid4().hex[:24]}", name, arguments))
                    self.calls += 1
                if not self._said:
                    self._dropped = None
            self._looked = 0

    def _take(self, size: int) -> str:
        taken, self._unread = self._unread[:size], self._unread[size:]
        return taken

    def _until(self, marks: Collection[str], ended: bool) -> tuple[str, str]:
        """Take the text before the first mark, as far as it is certain; returns it, and the mark or an empty text."""
        if (found := re.search("|".join(map(re.escape, marks)), self._unread)) is not None:
            return self._take(found.start()), found.group()
        sizes = range(min(len(self._unread), max(map(len, marks)) - 1), 0, -1)
        begun = next((n for n in sizes if any(m.startswith(self._unread[-n:]) for m in marks)), 0)
        return self._take(len(self._unread) - (0 if ended else begun)), ""

    def _say(self, field: Literal["reasoning_content", "content"], text: str, blank: str | None) -> None:
        """Add a text; of the characters `blank` at its end, None being white space, only those before more text."""
        text = (self._blank + text).lstrip(self._dropped)
        kept = text.rstrip(blank)
        self._blank = text[len(kept) :]
        if kept:
            self._dropped = ""
            self._said |= field == "content"
            self._add(Text(field, kept))

    def _add(self, event: Text) -> None:
        """Add an event to those found, as one with its neighbour of the same field."""
        last = self._found[-1] if self._found else None
        if isinstance(last, Text) and last.field == event.field:
            self._found.pop()
            event = Text(event.field, last.text + event.text)
        self._found.append(event)


def read_message(text: str, thinking: Thinking, tools: ToolFormat | None, *, parallel: bool = True) -> ChatMessage:
    reader = MessageReader(thinking, tools, parallel=parallel)
    return ChatMessage.of(reader.push(text) + reader.end())
