"""Constraints that hold an answer to well-formed calls of a request's tools."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ddtree_trt.errors import UsageError, shown
from ddtree_trt.runtime.chat.calls import (
    END_OF_CALL,
    END_OF_PARAMETER,
    ENDS_OF_TEXT,
    MAX_ALTERNATIVES,
    TOOL_CALL,
    alternatives,
    as_json,
    listed_values,
    schema_types,
)
from ddtree_trt.runtime.chat.parsers import ToolParser
from ddtree_trt.runtime.chat.reader import END_OF_THINKING, Thinking
from ddtree_trt.runtime.chat.tools import Tool, ToolUse
from ddtree_trt.runtime.structured.record import STRUCTURED, StructuredOutput

_ANY_OBJECT = {"type": "object"}
# As Python writes JSON, and with it the templates. A model that must call may else write white space without end.
_ONE_LINE: Mapping[str, Any] = {
    "x-guidance": {
        "whitespace_pattern": None, "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "
    }
}  # fmt: skip
_MAX_CHARACTERS = 1 << 20  # of a grammar: definitions are repeated with every parameter
_BARE_BEGIN = '{"name":'


def constraint(
    parser: ToolParser, use: ToolUse, thinking: Thinking, special: Collection[str] = ()
) -> StructuredOutput | None:
    """What holds an answer to calls that the parser reads; None where the answer is free. `special`: the marks that are
    a token each, which is then meant where one stands in a call.

    An answer that need not call is free up to the opening of its first call, where one of the tools is strict. Raises
    UsageError for a tool whose calls cannot be held to its schema.
    """
    opening, between = (_BARE_BEGIN, "; ") if parser == "llama3_json" else (TOOL_CALL, "\n")
    after, first = (None if thinking == "never" else END_OF_THINKING), literal(opening, special)
    if use.choice == "auto":
        if not any(tool.strict for tool in use.tools):
            return None
        after, first = opening, ""
    more = f"({literal(between + opening, special)} call)*" if use.parallel else ""
    rules = [f"start: {first} call {more}", "call: " + " | ".join(f"call{i}" for i in range(len(use.tools)))]
    for i, (tool, schema) in enumerate(_schemas(use)):
        head, body, end = _call(parser, tool, schema)
        rules.append(f"call{i}: {literal(head, special)} {body} {literal(end, special)}")
    if parser == "qwen3_coder":
        ends = "|".join(ENDS_OF_TEXT).replace("/", r"\/")
        rules += ["NAME: /[^<>\\n]+/", f"ANY: TEXT {_END}", rf"TEXT: /(?s:.*)/ & ~/(?s:.*({ends}).*)/"]
    return StructuredOutput(grammar="\n".join(rules), after=after)


def _call(parser: ToolParser, tool: Tool, schema: Mapping[str, Any]) -> tuple[str, str, str]:
    """A call behind its opening: a text, an expression of its arguments, and a text."""
    name, arguments = json.dumps(tool.name), f"%json {json.dumps({**_ONE_LINE, **_objects(schema)})}"
    if parser == "hermes":
        return f'\n{{"name": {name}, "arguments": ', arguments, f"}}\n{END_OF_CALL}"
    if parser == "llama3_json":
        return f' {name}, "parameters": ', arguments, "}"
    try:
        return f"\n<function={tool.name}>\n", _xml_parameters({**_ONE_LINE, **schema}), f"</function>\n{END_OF_CALL}"
    except _NotHeld as fault:
        raise UsageError(
            f"tools: calls of {tool.name}, as this model writes them, cannot be held to their schema because of "
            f"{fault}; leave that out, or have the tool neither strict nor required"
        ) from None


def literal(text: str, special: Collection[str]) -> str:
    """A text in Lark; the special tokens in it stand for themselves."""
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    return " ".join(part if part in special else _quoted(part) for part in parts if part) or '""'


def _schemas(use: ToolUse) -> list[tuple[Tool, Mapping[str, Any]]]:
    """The tools with the schemas that their arguments are held to."""
    must = use.choice == "required"
    return [(t, t.parameters if t.parameters and (t.strict or must) else _ANY_OBJECT) for t in use.tools]


def _objects(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of the objects that satisfy a schema."""
    kinds = schema.get("type")
    if kinds is None or (isinstance(kinds, list) and "object" in kinds):
        return {**schema, **_ANY_OBJECT}
    return schema if kinds == "object" else {"allOf": [_ANY_OBJECT, schema]}  # of which there is none


def check_schemas(use: ToolUse, check: Callable[[StructuredOutput], None]) -> None:
    """Check the schema of each tool by itself. Raises UsageError as `check` does, with the tool's name in it."""
    for tool, schema in _schemas(use):
        try:
            check(StructuredOutput(json_schema=_objects(schema)))
        except UsageError as error:
            raise UsageError(f"{STRUCTURED}: {tool.name}'s{str(error).partition(':')[2]}") from error


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_END = _quoted(f"\n{END_OF_PARAMETER}\n")


class _NotHeld(Exception):
    """What of a schema the texts of parameters cannot be held to."""


def _xml_parameters(schema: Mapping[str, Any]) -> str:
    """The expression of a call's parameters, in the schema's order; of any names without one. Raises _NotHeld."""
    match [*alternatives(schema, schema, ())]:
        case [{**arguments}]:
            others = arguments.get("additionalProperties", True)
            properties, wanted = arguments.get("properties", {}), arguments.get("required", [])
        case _:
            raise _NotHeld("a $ref that leads to no schema of an object")
    if more := sorted(map(str, arguments.keys() - {"type", "properties", "required", "additionalProperties"})):
        raise _NotHeld(", ".join(more))
    if outside := re.search(r'"\$ref": ("(?!#/(\$defs|definitions)/)[^"]*")', json.dumps(schema)):
        raise _NotHeld(f"the reference {outside[1]}, which is not to $defs or definitions")
    if not isinstance(properties, Mapping) or not isinstance(wanted, list):
        raise _NotHeld("properties that are no object, or required that is no list")
    required = {name for name in wanted if isinstance(name, str)}
    if nowhere := sorted(required - properties.keys()):
        raise _NotHeld(f"{shown(nowhere[0])}, which it requires and does not describe")
    if "properties" not in arguments and others is not False:
        if others not in (True, {}):
            raise _NotHeld("additionalProperties")
        return '("<parameter=" NAME ">\\n" ANY)*'
    parts, size = [], 0
    for name, of_value in properties.items():
        part = f"{_quoted(f'<parameter={name}>{chr(10)}')} {_xml_parameter(name, of_value, schema)}"
        parts.append(part if name in required else f"({part})?")
        if (size := size + len(part)) > _MAX_CHARACTERS:
            raise _NotHeld(f"its size, a grammar of more than {_MAX_CHARACTERS} characters")
    return " ".join(parts)


def _xml_parameter(name: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The expression of a parameter's text and its end. Raises _NotHeld."""
    if not re.fullmatch(r"[^<>\n]+", name):
        raise _NotHeld(f"the name {shown(name)}, which must have a character, and no <, > or end of a line")
    definitions = {key: root[key] for key in ("$defs", "definitions", "x-guidance") if key in root}
    kinds = schema_types(schema, root)
    if kinds and "string" not in kinds:
        return f"%json {json.dumps({**definitions, **schema})} {_END}"
    found = [*alternatives(schema, root, ("anyOf",))]
    if not found or not all(isinstance(each, Mapping) for each in found):
        raise _NotHeld(f"parameter {shown(name)}, which has no schema, or more than {MAX_ALTERNATIVES}")
    if all(each.keys() <= {"type"} for each in found):
        return "ANY"
    texts = []
    for each in found:
        own, keys = schema_types(each, root), sorted(each.keys() - {"type"})
        if own and "string" not in own:
            texts.append(f"%json {json.dumps({**definitions, **each})}")
        elif keys in (["enum"], ["const"]):
            texts += [_listed(name, value, kinds) for value in listed_values(each)]
        else:
            raise _NotHeld(f"{', '.join(keys) or 'a choice of any text'} of parameter {shown(name)}")
    return f"({' | '.join(texts)}) {_END}"


def _listed(name: str, value: Any, kinds: set[str]) -> str:
    """The expression of a listed value's text. Raises _NotHeld where that would be read as another value."""
    text = value if isinstance(value, str) else json.dumps(value)
    if json.loads(as_json(text, kinds)) != value or any(end in text for end in ENDS_OF_TEXT):
        raise _NotHeld(f"the value {shown(value)} of parameter {shown(name)}, which would be read as another")
    return _quoted(text)
