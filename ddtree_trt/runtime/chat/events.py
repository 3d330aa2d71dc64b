"""What the text of an answer says, in the order in which it says it, and the message that this makes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
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
        message = cls()
        for event in events:
            if isinstance(event, Reasoning):
                message.reasoning_content = (message.reasoning_content or "") + event.text
            elif isinstance(event, Content):
                message.content = (message.content or "") + event.text
            elif isinstance(event, CallBegin):
                message.tool_calls.append(ToolCall(event.id, event.name))
            else:
                message.tool_calls[event.index].arguments += event.text
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
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Reasoning | Content) and type(event) is type(last):
            found[-1] = type(event)(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and event.index == last.index:
            found[-1] = CallArguments(event.index, last.text + event.text)
        else:
            found.append(event)
    return found
