"""The tools that a request offers a model, and which of them it is to call, as OpenAI's API spells both."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ddtree_trt.errors import UsageError, shown
from ddtree_trt.reading import Expected, Pattern, check_fields

MAX_TOOLS = 1024


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: its name, unique among a request's tools.
        parameters: JSON schema of the object that it takes; None where any will do.
        strict: calls in which the arguments do not satisfy the schema are ruled out.
        description: the tool as chat templates are given it.
    """

    name: Annotated[str, Pattern(r"[\w.:/-]{1,128}", "1 to 128 letters, digits or any of _ . : / -")]
    parameters: Annotated[Mapping[str, Any], Expected("a JSON schema, an object")] | None
    strict: bool
    description: Mapping[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """A request's tools and how it wants them used; without tools where it may call none.

    Attributes:
        choice: whether the answer may consist of calls, or must.
        parallel: whether there may be more than one.
    """

    tools: tuple[Tool, ...] = ()
    choice: Literal["auto", "required"] = "auto"
    parallel: bool = True

    @property
    def schemas(self) -> dict[str, Any]:
        """Tool → JSON schema of its arguments."""
        return {tool.name: tool.parameters for tool in self.tools}

    @property
    def descriptions(self) -> list[Mapping[str, Any]]:
        """The tools for the chat template."""
        return [tool.description for tool in self.tools]


def read_tools(given: Any) -> tuple[Tool, ...]:
    """The tools of a list of `{"type": "function", "function": {"name", "description", "parameters", "strict"}}`. Other
    entries of a function are the chat template's. Raises UsageError."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or not given:
        raise UsageError(f"tools must be a list of at least one tool, not {shown(given)}")
    if len(given) > MAX_TOOLS:
        raise UsageError(f"tools: {len(given)} were given, at most {MAX_TOOLS} are taken")
    tools: dict[str, Tool] = {}
    for place, each in enumerate(given):
        tool = _tool(f"tools[{place}]", each)
        if tools.setdefault(tool.name, tool) is not tool:
            raise UsageError(f"tools[{place}].function.name: {shown(tool.name)} is there twice; rename one of the two")
    return tuple(tools.values())


def _tool(path: str, given: Any) -> Tool:
    match given:
        case {"type": "function", "function": {}, **rest} if not rest:
            entries: Any = given["function"]
        case _:
            raise UsageError(f"{path} must be {{'type': 'function', 'function': {{...}}}}, not {shown(given)}")
    # `strict` is for whoever runs the model, which was trained without it.
    shown_to_model = {key: value for key, value in entries.items() if key != "strict" and value is not None}
    description = {"type": "function", "function": shown_to_model}
    tool = Tool(entries.get("name"), entries.get("parameters"), entries.get("strict") or False, description)
    check_fields(tool, f"{path}.function.")
    return tool


def read_use(tools: Any, choice: Any, parallel: bool | None) -> ToolUse:
    """What a request says of tools. Raises UsageError, whose text begins with the name of what is wrong."""
    if tools is None:
        if choice not in (None, "none"):
            raise UsageError(f"tool_choice {shown(choice)} needs tools; give them, or leave tool_choice out")
        if parallel is not None:
            raise UsageError("parallel_tool_calls needs tools; give them, or leave it out")
        return ToolUse()
    offered = read_tools(tools)
    parallel = parallel is not False
    match choice:
        case None | "auto":
            return ToolUse(offered, "auto", parallel)
        case "none":  # without their descriptions the model does not begin a call
            return ToolUse()
        case "required":
            return ToolUse(offered, "required", parallel)
        case {"type": "function", "function": {"name": str(name), **rest}} if not rest:
            pass
        case _:
            raise UsageError(
                "tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}, "
                f"not {shown(choice)}"
            )
    chosen = tuple(tool for tool in offered if tool.name == name)
    if not chosen:
        known = ", ".join(tool.name for tool in offered[:20]) + ", ..." * (len(offered) > 20)
        raise UsageError(f"tool_choice names {shown(name)}, which is not among the tools: {known}")
    return ToolUse(chosen, "required", False)


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as chat templates take them: every content is a text, arguments of calls are objects, and what is
    None is left out. Raises UsageError."""
    return [_message(place, message) for place, message in enumerate(messages)]


def _message(place: int, given: Mapping[str, Any]) -> dict[str, Any]:
    message = {name: value for name, value in given.items() if value is not None}
    calls = message.pop("tool_calls", [])
    if calls or "reasoning_content" in message:
        message.setdefault("content", "")
    if not all(isinstance(message.get(name), str) for name in ("role", "content")):
        raise UsageError(f"a chat message needs a role and a content, texts: message {place} is {shown(dict(given))}")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise UsageError(f"the tool_calls of message {place} must be a list, not {shown(calls)}")
    if calls:  # templates ask whether the name is there
        message["tool_calls"] = [_call(f"tool_calls[{i}] of message {place}", call) for i, call in enumerate(calls)]
    return message


def _call(path: str, call: Any) -> dict[str, Any]:
    """A call whose arguments, JSON text or an object, are an object; none where there is nothing."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(
            f"{path} must be {{'id', 'type': 'function', 'function': {{'name', 'arguments'}}}}, not {shown(call)}"
        )
    given = arguments = function.get("arguments") or {}
    if isinstance(given, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(given.strip() or "{}")
    if not isinstance(arguments, Mapping):
        raise UsageError(f"the arguments of {path} must be the text of a JSON object, not {shown(given)}")
    return {**call, "function": {**function, "arguments": arguments}}
