"""Messages of a chat, checked and put into the form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ddtree_trt.errors import UsageError, shown
from ddtree_trt.runtime.values import check_text


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as chat templates take them: every content is a text, arguments of calls are objects, and what is
    None is left out. Raises UsageError."""
    return [_message(place, message) for place, message in enumerate(messages)]


def _message(place: int, given: Mapping[str, Any]) -> dict[str, Any]:
    message = {name: value for name, value in given.items() if value is not None}
    calls = message.pop("tool_calls", [])
    if calls or "reasoning_content" in message:
        message.setdefault("content", "")
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            raise UsageError(
                f"a chat message needs a role and a content, both text: message {place} is {shown(dict(given))}"
            )
    for name in ("role", "content", "reasoning_content", "name", "tool_call_id"):
        if name in message:
            if not isinstance(message[name], str):
                raise UsageError(f"the {name} of message {place} must be a text, not {shown(message[name])}")
            check_text(f"the {name} of message {place}", message[name])
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise UsageError(f"the tool_calls of message {place} must be a list, not {shown(calls)}")
    if calls:  # templates ask whether the name is there
        message["tool_calls"] = [_call(f"tool_calls[{i}] of message {place}", call) for i, call in enumerate(calls)]
    return message


def _call(path: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(
            f"{path} must be {{'id', 'type': 'function', 'function': {{'name', 'arguments'}}}}, not {shown(call)}"
        )
    given = function.get("arguments")
    return {**call, "function": {**function, "arguments": _arguments(f"the arguments of {path}", given)}}


def _arguments(name: str, given: Any) -> Mapping[str, Any]:
    """The arguments of a call, given as JSON text or as an object; none where there is nothing."""
    value = given
    if isinstance(given, str):
        check_text(name, given)
        try:
            value = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{name} must be the text of a JSON object; {shown(given)} is not JSON") from error
    if value is None:
        value = {}
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must be the text of a JSON object, not {shown(given)}")
    return value
