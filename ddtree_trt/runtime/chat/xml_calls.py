"""Calls of tools as Qwen3-Coder writes them: a tag for the function and one for each parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from ddtree_trt.runtime.chat.json_calls import TOOL_CALL, end_of_tag
from ddtree_trt.runtime.chat.json_text import Malformed, parse
from ddtree_trt.runtime.chat.reader import CallWriter, MessageReader
from ddtree_trt.runtime.chat.scanner import Scanner, Sink, Steps

_FUNCTION, _END_OF_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_OF_PARAMETER = "<parameter=", "</parameter>"
_ENDS = (_END_OF_PARAMETER, _END_OF_FUNCTION, _PARAMETER)  # of a value; models leave the first one out at times
_WORDS: Mapping[str, Any] = {"True": True, "False": False, "None": None}  # Python's, which models write
_OF_JSON: Mapping[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"
}  # fmt: skip
_NAME = re.compile(r"[^<>\n]+")
_Known = set[tuple[int, bool]]  # the place behind a parameter's mark, and whether the call is in a tag


class XmlCalls:
    """`<tool_call><function=NAME><parameter=NAME>VALUE</parameter>…</function></tool_call>`, any number of them.

    Values are texts; `parameters` of a tool, a JSON schema, says which of them are numbers, lists and so on. A value
    that is not of its type stays a text.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        """`parameters`: tool → JSON schema of its arguments."""
        self._parameters = parameters

    def read(self, reader: MessageReader) -> Steps[None]:
        scanner = reader.scanner
        known: _Known = set()
        while mark := (yield from scanner.until((TOOL_CALL, _FUNCTION), reader.content)):
            yield from reader.call(mark, partial(self._call, scanner, mark == TOOL_CALL, known))

    def _call(self, scanner: Scanner, tagged: bool, known: _Known, call: CallWriter) -> Steps[None]:
        """Read a call behind its first mark. `known`: the parameters to which readings have come so far; one that comes
        to the same again would go on as the first did, which was of no call."""
        if tagged:
            yield from scanner.space()
            yield from scanner.expect(_FUNCTION)
        function = yield from _name(scanner)
        yield from scanner.space()
        ends = yield from scanner.accept(_END_OF_FUNCTION)
        if not ends:
            yield from scanner.expect(_PARAMETER)
        call.begin(function)
        brace = "{"
        while not ends:
            if (scanner.place, tagged) in known:
                raise Malformed
            known.add((scanner.place, tagged))
            parameter = yield from _name(scanner)
            call.arguments(f"{brace}{json.dumps(parameter, ensure_ascii=False)}: ")
            brace = ", "
            end = yield from self._value(scanner, call, function, parameter)
            if end == _END_OF_PARAMETER:
                yield from scanner.space()
                end = _PARAMETER if (yield from scanner.accept(_PARAMETER)) else _END_OF_FUNCTION
                if end == _END_OF_FUNCTION:
                    yield from scanner.expect(end)
            ends = end == _END_OF_FUNCTION
        call.arguments("{}" if brace == "{" else "}")
        if tagged:
            yield from scanner.space()
            yield from end_of_tag(scanner)

    def _value(self, scanner: Scanner, call: CallWriter, function: str, parameter: str) -> Steps[str]:
        """Read a value, without the line breaks at its ends; returns the mark behind it."""
        yield from scanner.accept("\n")
        kinds = parameter_types(self._parameters.get(function), parameter)
        pieces: list[str] = []
        text = _WithoutLastBreak(pieces.append)
        if kinds == {"string"}:
            call.arguments('"')
            text = _WithoutLastBreak(lambda piece: call.arguments(json.dumps(piece, ensure_ascii=False)[1:-1]))
        end = yield from scanner.until(_ENDS, text)
        if not end:
            text.flush()
            raise Malformed
        call.arguments('"' if kinds == {"string"} else _as_json("".join(pieces), kinds))
        return end


class _WithoutLastBreak:
    """Passes text on, without a line break at its end."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = ""

    def __call__(self, text: str) -> None:
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._sink(text.removesuffix("\n"))

    def flush(self) -> None:
        self._sink(self._held)


def _name(scanner: Scanner) -> Steps[str]:
    """Read a name and the bracket behind it."""
    pieces: list[str] = []
    while (yield from scanner.peek()) not in ("", *">\n<"):
        part = _NAME.match(scanner.text, scanner.at)
        assert part is not None
        pieces.append(part.group())
        scanner.at = part.end()
    yield from scanner.expect(">")
    if not pieces:
        raise Malformed
    return "".join(pieces)


def parameter_types(parameters: Any, name: str) -> set[str]:
    """The types that the schema of a tool's arguments gives one of them; empty where it does not say."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return _schema_types(properties.get(name) if isinstance(properties, Mapping) else None, 0)


def _schema_types(schema: Any, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {kind for kind in given if isinstance(kind, str)}
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if values:
        return {_OF_JSON.get(type(value), "object") for value in values}
    found: set[str] = set()
    for key in ("anyOf", "oneOf"):
        for each in schema[key] if isinstance(schema.get(key), list) else ():
            kinds = _schema_types(each, depth + 1)
            if not kinds:
                return set()
            found |= kinds
    return found


def _as_json(text: str, kinds: set[str]) -> str:
    """JSON of a parameter's text: the text itself where it is JSON of one of the types, otherwise a string of it. Where
    the types are not known, objects and lists are taken for what they look like."""
    value: Any = text
    written = ""
    try:
        value = _WORDS[text] if text in _WORDS else parse(text)
        written = json.dumps(value) if text in _WORDS else text.strip()
    except Malformed:
        pass
    kind = _OF_JSON[type(value)]
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        kind = "integer"
    if kind == "integer" and "number" in kinds:
        kind = "number"
    if kind == "string" or kind not in (kinds or ("object", "array")):
        return json.dumps(text, ensure_ascii=False)
    return written
