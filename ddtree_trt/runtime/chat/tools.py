"""The tools that a request offers a model, and which of them it is to call, as OpenAI's API spells both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddtree_trt.errors import UsageError, shown

MAX_TOOLS = 1024
_NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: its name, unique among a request's tools.
        parameters: JSON schema of the object that it takes; None where any will do.
        strict: calls in which the arguments do not satisfy the schema are ruled out.
        description: the tool as chat templates are given it.
    """

    name: str
    parameters: Mapping[str, Any] | None
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
    tools = tuple(_tool(f"tools[{place}]", each) for place, each in enumerate(given))
    seen: set[str] = set()
    for place, tool in enumerate(tools):
        if tool.name in seen:
            raise UsageError(f"tools[{place}].function.name: {shown(tool.name)} is there twice; rename one of the two")
        seen.add(tool.name)
    return tools


def _tool(path: str, given: Any) -> Tool:
    if not isinstance(given, Mapping) or given.get("type") != "function" or set(given) - {"type", "function"}:
        found = shown(given.get("type")) if isinstance(given, Mapping) and "type" in given else shown(given)
        raise UsageError(f"{path} must be {{'type': 'function', 'function': {{...}}}}; found {found}")
    function = given.get("function")
    if not isinstance(function, Mapping):
        raise UsageError(f"{path}.function must be an object with a name and parameters, not {shown(function)}")
    name, parameters, strict = (function.get(key) for key in ("name", "parameters", "strict"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"{path}.function.name must be 1 to 128 letters, digits or any of _ . : / -, not {shown(name)}"
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise UsageError(f"{path}.function.parameters must be a JSON schema, an object, not {shown(parameters)}")
    if strict is not None and not isinstance(strict, bool):
        raise UsageError(f"{path}.function.strict must be true or false, not {shown(strict)}")
    text = function.get("description")
    if text is not None and not isinstance(text, str):
        raise UsageError(f"{path}.function.description must be a text, not {shown(text)}")
    # `strict` is for whoever runs the model, which was trained without it.
    shown_to_model = {key: value for key, value in function.items() if key != "strict" and value is not None}
    return Tool(name, parameters, bool(strict), {"type": "function", "function": shown_to_model})


def read_use(tools: Any, choice: Any, parallel: bool | None) -> ToolUse:
    """What a request says of tools, None standing for what it does not say. Raises UsageError, whose text begins with
    the name of what is wrong."""
    if tools is None:
        if choice not in (None, "none"):
            raise UsageError(f"tool_choice {shown(choice)} needs tools; give them, or leave tool_choice out")
        if parallel is not None:
            raise UsageError("parallel_tool_calls needs tools; give them, or leave it out")
        return ToolUse()
    offered = read_tools(tools)
    parallel = parallel is not False
    if choice in (None, "auto"):
        return ToolUse(offered, "auto", parallel)
    if choice == "none":  # without their descriptions the model does not begin a call
        return ToolUse()
    if choice == "required":
        return ToolUse(offered, "required", parallel)
    name = _named(choice)
    chosen = tuple(tool for tool in offered if tool.name == name)
    if not chosen:
        known = ", ".join(tool.name for tool in offered[:20]) + ", ..." * (len(offered) > 20)
        raise UsageError(f"tool_choice names {shown(name)}, which is not among the tools: {known}")
    return ToolUse(chosen, "required", False)


def _named(choice: Any) -> Any:
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or len(function) > 1:
        raise UsageError(
            "tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}, "
            f"not {shown(choice)}"
        )
    return function["name"]
