"""Constraints that hold an answer to well-formed calls of a request's tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ddtree_trt.runtime.chat.calls import END_OF_CALL, TOOL_CALL, listed_values, parameter_types
from ddtree_trt.runtime.chat.reader import END_OF_THINKING, Thinking
from ddtree_trt.runtime.chat.tools import Tool, ToolUse
from ddtree_trt.runtime.structured.record import StructuredOutput, Tag

_ANY_OBJECT = {"type": "object"}
# As Python writes JSON, and with it the templates. A model that must call may else write white space without end.
_ONE_LINE = {"whitespace_pattern": None, "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_BARE_BEGIN = '{"name":'


def tagged_json(use: ToolUse, thinking: Thinking) -> StructuredOutput | None:
    """The constraint for calls that `TaggedJson` reads; None where the answer is free."""
    return _json(use, thinking, (TOOL_CALL, '\n{"name":', "arguments", f"}}\n{END_OF_CALL}"), "\n")


def bare_json(use: ToolUse, thinking: Thinking) -> StructuredOutput | None:
    return _json(use, thinking, (_BARE_BEGIN, "", "parameters", "}"), "; ")


def _json(use: ToolUse, thinking: Thinking, call: tuple[str, str, str, str], between: str) -> StructuredOutput | None:
    """The constraint for calls of one object each. `call`: how one begins, what follows up to the name, what the
    arguments are called, and how it ends."""
    opening, to_name, arguments, end = call
    if (begin := _beginning(use, thinking, opening)) is None:
        return None
    after, first = begin
    tags = tuple(
        Tag(f'{first}{to_name} {json.dumps(tool.name)}, "{arguments}": ', schema, end) for tool, schema in _schemas(use)
    )
    separator = between + opening[: len(opening) - len(first)]
    most = None if use.parallel else 1
    return StructuredOutput(tags=tags, at_least=1, at_most=most, separator=separator, after=after)


def xml(use: ToolUse, thinking: Thinking) -> StructuredOutput | None:
    if (begin := _beginning(use, thinking, TOOL_CALL)) is None:
        return None
    after, opening = begin
    rules = ["NAME: /[^<>\\n]+/"]
    for i, (tool, schema) in enumerate(_schemas(use)):
        body = _xml_parameters(f"p{i}", schema, rules)
        rules.append(
            f"call{i}: {_text(f'{opening}{chr(10)}<function={tool.name}>{chr(10)}')} {body} "
            f"{_text(f'</function>{chr(10)}{END_OF_CALL}')}"
        )
    call = "(" + " | ".join(f"call{i}" for i in range(len(use.tools))) + ")"
    more = f" ({_text(chr(10) + TOOL_CALL[: len(TOOL_CALL) - len(opening)])} {call})*" if use.parallel else ""
    return StructuredOutput(grammar="\n".join([f"start: {call}{more}", *rules]), after=after)


def _beginning(use: ToolUse, thinking: Thinking, opening: str) -> tuple[str | None, str] | None:
    """Behind which text the constraint begins, and what is then still to be written of a first call's opening; None
    where nothing is constrained.

    An answer that need not call is free up to the opening of its first call, where one of the tools is strict.
    """
    if use.choice == "auto":
        return (opening, "") if any(tool.strict for tool in use.tools) else None
    return (None if thinking == "never" else END_OF_THINKING), opening


def _schemas(use: ToolUse) -> list[tuple[Tool, dict[str, Any]]]:
    """The tools with the schemas that their arguments are held to."""
    found = []
    for tool in use.tools:
        schema = tool.parameters if tool.parameters and (tool.strict or use.choice == "required") else _ANY_OBJECT
        found.append((tool, {"x-guidance": _ONE_LINE, **schema}))
    return found


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _xml_parameters(prefix: str, schema: Mapping[str, Any], rules: list[str]) -> str:
    """The expression of a call's parameters, for which rules are added. They come in the schema's order; where it
    lists none, they may have any name."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        rules.append(_any_value(prefix))
        return f'("<parameter=" NAME ">\\n" {prefix})*'
    required = schema.get("required")
    parts = []
    for j, (name, of_value) in enumerate(properties.items()):
        rule = f"{prefix}_{j}"
        kinds = parameter_types(schema, name)
        if kinds and "string" not in kinds and isinstance(of_value, Mapping):
            definitions = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
            rules.append(f'{rule}: %json {json.dumps({**definitions, **of_value})} "\\n</parameter>\\n"')
        elif kinds == {"string"} and (texts := [t for t in listed_values(of_value) if isinstance(t, str)]):
            words = " | ".join(map(_text, texts))
            rules.append(f'{rule}: ({words}) "\\n</parameter>\\n"')
        else:
            rules.append(_any_value(rule))
        part = f"{_text(f'<parameter={name}>{chr(10)}')} {rule}"
        parts.append(part if isinstance(required, list) and name in required else f"({part})?")
    return " ".join(parts)


def _any_value(rule: str) -> str:
    """The rule of that name for a parameter of any text, up to its end."""
    return f"{rule}[suffix={_text(chr(10) + '</parameter>' + chr(10))}]: /(?s:.*)/"
