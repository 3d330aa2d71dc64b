"""Calls of tools as models write them: JSON in tags (Qwen, Hermes), bare JSON (Llama 3), or tags (Qwen3-Coder)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from ddtree_trt.runtime.chat.reader import Malformed, MessageReader, Steps, Unread

TOOL_CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_FUNCTION, _PARAMETER, _END_OF_FUNCTION = "<function=", "<parameter=", "</function>"

# Of JSON. Outside of strings it has none of the characters that open calls: of openings one in the other, two are read.
_OUTSIDE, _INSIDE = re.compile(r"[ \t\r\n\w:,.+-]*"), re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_KEY = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')

_OPENING = re.compile(rf"(?:{TOOL_CALL}\s*)?{_FUNCTION}")
_END_OF_NAME, _NAME_ENDS = re.compile(r"[<>\n]"), re.compile(_END_OF_FUNCTION)
# A value ends at the next parameter too, and at the function's end: models leave its own end out at times.
_VALUE = re.compile(rf"{_PARAMETER}([^<>\n]+)>\n?(.*?)\n?(?:</parameter>[ \t\r\n]*|(?={_PARAMETER})|\Z)", re.DOTALL)
_WORDS: Mapping[str, Any] = {"True": True, "False": False, "None": None}  # Python's, which models write
_OF_JSON: Mapping[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"
}  # fmt: skip


class TaggedJson:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them; content may stand around them."""

    def read(self, reader: MessageReader) -> Steps[None]:
        unread = reader.unread

        def call(at: int) -> Steps[tuple[str, str, int]]:
            name, arguments, at = yield from _json_call(unread, (yield from unread.space(at)))
            return name, arguments, (yield from _behind_tag(unread, at))

        while mark := (yield from unread.until((TOOL_CALL,), reader.content)):
            yield from reader.call(len(mark), call)


class BareJson:
    """`{"name": …, "parameters": {…}}` where the answer begins with it, or anywhere behind `<|python_tag|>`; further
    calls directly behind, with a semicolon or nothing between."""

    def read(self, reader: MessageReader) -> Steps[None]:
        unread, mark = reader.unread, ""
        while True:
            at = yield from unread.space(len(mark))
            while (yield from reader.call(at, lambda at: _json_call(unread, at))):
                at = yield from unread.space(0)
                if (yield from unread.begins(";", at)):
                    at = yield from unread.space(at + 1)
                if (yield from unread.char(at)) != "{":
                    reader.content(unread.take(at))
                    break
            if not (mark := (yield from unread.until((PYTHON_TAG,), reader.content))):
                return


def _json_call(unread: Unread, start: int) -> Steps[tuple[str, str, int]]:
    """Name, arguments as they are written, and end of a call that is an object; its other fields are none of its."""
    end = yield from _end_of_object(unread, start)
    text = unread.text[start:end]
    parse_json(text)
    fields: dict[str, Any] = {}
    at = 1
    while key := _KEY.match(text, at):
        value, at = json.JSONDecoder().raw_decode(text, key.end())
        fields.setdefault(json.loads(key[1]), (value, text[key.end() : at]))
    name, _ = fields.get("name", (None, ""))
    value, arguments = fields.get("arguments", fields.get("parameters", (None, "")))
    # An escape may be half of a character, which no answer could hold.
    if not isinstance(name, str) or not name or not isinstance(value, dict) or re.search("[\ud800-\udfff]", name):
        raise Malformed
    return name, arguments, end


def _end_of_object(unread: Unread, at: int) -> Steps[int]:
    """The place behind the object that begins at `at`, by its brackets. Raises Malformed where there is none."""
    if (yield from unread.char(at)) != "{":
        raise Malformed
    depth, quoted, at = 1, False, at + 1
    while depth:
        match = (_INSIDE if quoted else _OUTSIDE).match(unread.text, at)
        at = match.end() if match else at
        char = yield from unread.char(at)
        if quoted and char not in ("", '"'):  # the text went on, perhaps with an escape
            char = yield from unread.char(at + 1)
            at -= 1
        elif char == '"':
            quoted = not quoted
        elif char in ("{", "["):
            depth += 1
        elif char in ("}", "]"):
            depth -= 1
        elif not _OUTSIDE.fullmatch(char):
            raise Malformed
        if not char:
            raise Malformed
        at += 1
    return at


def _behind_tag(unread: Unread, at: int) -> Steps[int]:
    """The place behind `</tool_call>`, of which any part may be missing where the text ends."""
    at = yield from unread.space(at)
    if (yield from unread.begins(END_OF_CALL, at)):
        return at + len(END_OF_CALL)
    if len(unread.text) - at < len(END_OF_CALL) and unread.ended and END_OF_CALL.startswith(unread.text[at:]):
        return len(unread.text)
    raise Malformed


class XmlCalls:
    """`<tool_call><function=NAME><parameter=NAME>VALUE</parameter>…</function></tool_call>`, any number of them.

    Values are texts; `parameters` of a tool, a JSON schema, says which of them are numbers, lists and so on. A value
    that is not of its type stays a text.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        """`parameters`: tool → JSON schema of its arguments."""
        self._parameters = parameters

    def read(self, reader: MessageReader) -> Steps[None]:
        unread = reader.unread
        while mark := (yield from unread.until((TOOL_CALL, _FUNCTION), reader.content)):
            yield from reader.call(len(mark), lambda at: self._call(unread, at))

    def _call(self, unread: Unread, at: int) -> Steps[tuple[str, str, int]]:
        tagged = unread.text.startswith(TOOL_CALL)
        if tagged:
            at = yield from unread.space(at)
            if not (yield from unread.begins(_FUNCTION, at)):
                raise Malformed
            at += len(_FUNCTION)
        name = yield from unread.find(_END_OF_NAME, at, 1)
        function = unread.text[at : name.start()]
        if name.group() != ">" or not function:
            raise Malformed
        at = yield from unread.space(name.end())
        if not ((yield from unread.begins(_PARAMETER, at)) or (yield from unread.begins(_END_OF_FUNCTION, at))):
            raise Malformed
        end = yield from unread.find(_NAME_ENDS, at, len(_END_OF_FUNCTION))
        written = []
        for each in _VALUE.finditer(unread.text, at, end.start()):
            if each.start() != at:
                break
            at = each.end()
            value = _as_json(each[2], parameter_types(self._parameters.get(function), each[1]))
            written.append(f"{json.dumps(each[1], ensure_ascii=False)}: {value}")
        if at != end.start():
            # Those before it would come to the same place: only the last opening may still be that of a call.
            last = [each.start() for each in _OPENING.finditer(unread.text, at, end.start())]
            raise Malformed(last[-1] if last else end.start())
        at = (yield from _behind_tag(unread, end.end())) if tagged else end.end()
        return function, f"{{{', '.join(written)}}}", at


def parameter_types(parameters: Any, name: str) -> set[str]:
    """The types that the schema of a tool's arguments gives one of them; empty where it does not say."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return _schema_types(properties.get(name) if isinstance(properties, Mapping) else None, 0)


def _schema_types(schema: Any, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    given = schema.get("type")
    if isinstance(given, str | list):
        return {kind for kind in ([given] if isinstance(given, str) else given) if isinstance(kind, str)}
    if values := listed_values(schema):
        return {_OF_JSON.get(type(value), "object") for value in values}
    found: set[str] = set()
    for key in ("anyOf", "oneOf"):
        for each in schema[key] if isinstance(schema.get(key), list) else ():
            kinds = _schema_types(each, depth + 1)
            if not kinds:
                return set()
            found |= kinds
    return found


def listed_values(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists, if it does."""
    return schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []


def _as_json(text: str, kinds: set[str]) -> str:
    """JSON of a parameter's text: the text itself where it is JSON of one of the types, otherwise a string of it. Where
    the types are not known, objects and lists are taken for what they look like."""
    value: Any = text
    written = ""
    if kinds != {"string"}:
        try:
            value = _WORDS[text] if text in _WORDS else parse_json(text)
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


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises Malformed, also for the numbers that Python adds to JSON and deep nesting."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise Malformed from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)
