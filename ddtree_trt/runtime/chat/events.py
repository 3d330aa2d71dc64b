"""What the text of an answer says, in the order in which it says it, and the message that this makes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any


@dataclass(frozen=True)
class Reasoning:
    """The next part of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class Content:
    """The next part of what it says."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call of a tool; `index` counts the calls of a message from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next part of a call's arguments; all parts joined are the text of a JSON object."""

    index: int
    text: str


Event = Reasoning | Content | CallBegin | CallArguments


@dataclass
class ToolCall:
    """A call of a tool; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str = ""


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
        parts: dict[type[Event], list[Event]] = {Reasoning: [], Content: []}
        calls: list[tuple[CallBegin, list[Event]]] = []
        for event in events:
            if isinstance(event, CallBegin):
                calls.append((event, []))
            elif isinstance(event, CallArguments):
                calls[event.index][1].append(event)
            else:
                parts[type(event)].append(event)
        message = cls(
            _text(parts[Content]) or None,
            _text(parts[Reasoning]) or None,
            [ToolCall(begin.id, begin.name, _text(arguments)) for begin, arguments in calls],
        )
        if message == cls():
            message.content = ""
        return message

    def to_dict(self) -> dict[str, Any]:
        """The message as OpenAI's API has it, to be put behind the others of its chat."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.tool_calls
        ]
        parts = {"reasoning_content": self.reasoning_content, "tool_calls": calls or None}
        return {
            "role": "assistant",
            "content": self.content,
            **{name: part for name, part in parts.items() if part is not None},
        }


def joined(events: Iterable[Event]) -> list[Event]:
    """The events with neighbours that say more of the same made one."""
    found: list[Event] = []
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "index", None))):
        first, *more = group
        if isinstance(first, CallBegin):
            found += [first, *more]
        else:
            found.append(replace(first, text=_text([first, *more])))
    return found


def _text(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if not isinstance(event, CallBegin))
