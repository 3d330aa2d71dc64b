"""Calls of tools as models write them: JSON in tags (Qwen, Hermes), bare JSON (Llama 3), or tags (Qwen3-Coder)."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn
from urllib.parse import unquote

TOOL_CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_FUNCTION, _PARAMETER, _END_OF_FUNCTION = "<function=", "<parameter=", "</function>"
END_OF_PARAMETER = "</parameter>"
ENDS_OF_TEXT = (END_OF_PARAMETER, _PARAMETER, _END_OF_FUNCTION)  # of a parameter, which it cannot have in it

_SPACE = re.compile(r"[ \t\r\n]*")
_KEY = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')
_BETWEEN = re.compile(r"[ \t\r\n]*;?[ \t\r\n]*")  # bare calls
_CUT = 12  # characters that an escape or a word of JSON has at most

_OPENING = re.compile(rf"(?:{TOOL_CALL}\s*)?{_FUNCTION}")
_HEAD = re.compile(rf"(?:{TOOL_CALL}[ \t\r\n]*)?{_FUNCTION}([^<>\n]+)>[ \t\r\n]*(?={_PARAMETER}|{_END_OF_FUNCTION})")
# A value ends at the next parameter too, and at the function's end: models leave its own end out at times.
_NAME = re.compile(rf"{_PARAMETER}([^<>\n]+)>\n?")
_VALUE = re.compile(rf"(.*?)\n?(?:{END_OF_PARAMETER}[ \t\r\n]*|(?={_PARAMETER})|\Z)", re.DOTALL)
_BEHIND_JSON = re.compile(rf"[ \t\r\n]*(?:{END_OF_PARAMETER}[ \t\r\n]*|(?={_PARAMETER}|{_END_OF_FUNCTION}))")
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's, which models write
_OF_JSON: Mapping[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"
}  # fmt: skip
# What a schema says without ruling out a value, beside names of extensions, which begin with x-.
_ANNOTATIONS = frozenset(
    "$anchor $comment $defs $id $schema default definitions deprecated description example examples readOnly title "
    "writeOnly".split()
)
MAX_ALTERNATIVES = 100  # of a value: each parameter may refer to the same ones
Calls = tuple[list[tuple[str, str]], int]


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_refuse)  # without the numbers that Python adds to JSON


class Malformed(Exception):
    """The text is no call. `content`: how many characters of it belong to none; None: its opening."""

    def __init__(self, content: int | None = None) -> None:
        self.content = content


class Incomplete(Exception):
    """More text may make a call of this one."""


# How families of models write calls. `marks`: what opens a call → what it has to have; empty: it is whole at the
# answer's end. `bare`: whether an answer that is an object may be a call. `calls`: names and arguments of those with
# which a text begins, whose opening is `mark`, and their end; nothing follows one that has `ended`. Raises Malformed,
# Incomplete.


class TaggedJson:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them; content may stand around them."""

    marks: Mapping[str, str] = {TOOL_CALL: END_OF_CALL}
    bare = False

    def calls(self, text: str, mark: str, *, ended: bool) -> Calls:
        name, arguments, end = _json_call(text, _behind(_SPACE, text, len(mark)), ended)
        return [(name, arguments)], _behind_tag(text, end, ended)


class BareJson:
    """`{"name": …, "parameters": {…}}` where the answer begins with it, or anywhere behind `<|python_tag|>`; further
    calls directly behind, with a semicolon or nothing between. They are read at the answer's end."""

    marks: Mapping[str, str] = {PYTHON_TAG: ""}
    bare = True

    def calls(self, text: str, mark: str, *, ended: bool) -> Calls:
        found: list[tuple[str, str]] = []
        end, at = 0, _behind(_SPACE, text, len(mark))
        while text.startswith("{", at):
            try:
                name, arguments, end = _json_call(text, at, ended)
            except Malformed:
                break
            found.append((name, arguments))
            at = _behind(_BETWEEN, text, end)
        if not found:
            raise Malformed(max(at, 1))
        return found, end


def _behind(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _json_call(text: str, start: int, ended: bool) -> tuple[str, str, int]:
    """Name, arguments as they are written, and end of a call that is an object; its other fields are none of its."""
    if not text.startswith("{", start):
        raise Malformed
    end = _behind_json(text, start, ended)
    fields: dict[str, Any] = {}
    at = start + 1
    while key := _KEY.match(text, at, end):
        value, at = _DECODER.raw_decode(text, key.end())
        fields.setdefault(json.loads(key[1]), (value, text[key.end() : at]))
    name, _ = fields.get("name", (None, ""))
    value, arguments = fields.get("arguments", fields.get("parameters", (None, "")))
    # An escape may be half of a character, which no answer could hold.
    if not isinstance(name, str) or not name or not isinstance(value, dict) or re.search("[\ud800-\udfff]", name):
        raise Malformed
    return name, arguments, end


def _behind_json(text: str, start: int, ended: bool) -> int:
    """The place behind a value in JSON. Raises Malformed, Incomplete."""
    try:
        return _DECODER.raw_decode(text, start)[1]
    except json.JSONDecodeError as error:
        if not ended and (error.msg.startswith("Unterminated string") or error.pos > len(text) - _CUT):
            raise Incomplete from None
        raise Malformed from None
    except (ValueError, RecursionError):
        raise Malformed from None


def _behind_tag(text: str, at: int, ended: bool) -> int:
    """The place behind `</tool_call>`, of which any part may be missing where the text ends."""
    at = _behind(_SPACE, text, at)
    if text.startswith(END_OF_CALL, at):
        return at + len(END_OF_CALL)
    if not END_OF_CALL.startswith(text[at : at + len(END_OF_CALL)]):
        raise Malformed
    if not ended:
        raise Incomplete
    return len(text)


class XmlCalls:
    """`<tool_call><function=NAME><parameter=NAME>VALUE</parameter>…</function></tool_call>`, any number of them.

    Values are texts; `parameters` of a tool, a JSON schema, says which of them are numbers, lists and so on. A value
    that is not of its type stays a text, which ends at the first tag; strings in lists and objects may have some.
    """

    marks: Mapping[str, str] = {TOOL_CALL: END_OF_CALL, _FUNCTION: _END_OF_FUNCTION}
    bare = False

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        """`parameters`: tool → JSON schema of its arguments."""
        self._parameters = parameters

    def calls(self, text: str, mark: str, *, ended: bool) -> Calls:
        end = self._end(text, 0, ended)
        if not (head := _HEAD.match(text)):
            raise Malformed
        function, at, written = head[1], head.end(), []
        while name := _NAME.match(text, at, end):
            kinds = parameter_types(self._parameters.get(function), name[1])
            value, at = self._value(text, name.end(), end, kinds, ended)
            written.append(f"{json.dumps(name[1], ensure_ascii=False)}: {as_json(value, kinds)}")
            end = self._end(text, at, ended)
        if at != end:
            # Those before it would come to the same place: only the last opening may still be that of a call.
            last = [each.start() for each in _OPENING.finditer(text, at, end)]
            raise Malformed(last[-1] if last else end)
        at = end + len(_END_OF_FUNCTION)
        return [(function, f"{{{', '.join(written)}}}")], _behind_tag(text, at, ended) if mark == TOOL_CALL else at

    def _end(self, text: str, start: int, ended: bool) -> int:
        if (end := text.find(_END_OF_FUNCTION, start)) < 0:
            raise Malformed(len(text)) if ended else Incomplete
        return end

    def _value(self, text: str, start: int, end: int, kinds: set[str], ended: bool) -> tuple[str, int]:
        """A parameter's value and the place behind its end, in a call that ends at `end` if the value is a text."""
        if text[start] in "[{" and (not kinds or kinds & {"object", "array"}):
            behind = start
            with suppress(Malformed):
                behind = _behind_json(text, start, ended)
            if whole := _BEHIND_JSON.match(text, behind):
                return text[start:behind], whole.end()
            at = _behind(_SPACE, text, behind)
            if behind > start and not ended and any(t.startswith(text[at : at + len(t)]) for t in ENDS_OF_TEXT):
                raise Incomplete
        value = _VALUE.match(text, start, end)
        assert value is not None, "anything is a value up to the end"
        return value[1], value.end()


ToolFormat = TaggedJson | BareJson | XmlCalls


def parameter_types(parameters: Any, name: str) -> set[str]:
    """The types that the schema of a tool's arguments gives one of them; empty where it does not say."""
    match [*alternatives(parameters, parameters, ())]:
        case [{"properties": {**properties}}] if name in properties:
            return schema_types(properties[name], parameters)
    return set()


def schema_types(schema: Any, root: Any) -> set[str]:
    """The types of the values that a schema within `root` allows; empty where it does not say."""
    found: set[str] = set()
    for each in alternatives(schema, root, ("anyOf", "oneOf")):
        match each:
            case {"type": str(kind)}:
                found.add(kind)
            case {"type": [*kinds]}:
                found |= {kind for kind in kinds if isinstance(kind, str)}
            case {"enum": [_, *_]} | {"const": _}:
                found |= {_OF_JSON.get(type(value), "object") for value in listed_values(each)}
            case _:
                return set()
    return found


def alternatives(schema: Any, root: Any, either: Collection[str]) -> Iterator[Any]:
    """The schemas of which a value must satisfy one where it is to satisfy `schema`, without annotations. References
    within `root` are followed, and keywords that say one of several, `either`, where nothing stands beside them. None
    ends more than MAX_ALTERNATIVES."""
    todo, seen = [schema], set[str]()
    for place, each in enumerate(todo):
        if place > MAX_ALTERNATIVES:
            yield None
            return
        given = each
        if isinstance(each, Mapping):
            given = {key: each[key] for key in each if key not in _ANNOTATIONS and not key.startswith("x-")}
        match [*given.items()] if isinstance(given, Mapping) else []:
            case [("$ref", str(reference))]:
                todo += [] if reference in seen else [_referred(reference, root)]
                seen.add(reference)
            case [("allOf", [only])]:
                todo.append(only)
            case [(key, [*several])] if key in either:
                todo += several
            case _:
                yield {} if given is True else given


def _referred(reference: str, root: Any) -> Any:
    """What a JSON pointer such as `#/$defs/name` points to; None where that is nothing."""
    start, *path = unquote(reference).split("/")
    found = root if start == "#" else None
    for part in path:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def listed_values(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists, if it does."""
    return schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []


def as_json(text: str, kinds: set[str]) -> str:
    """JSON of a parameter's text: itself where it is JSON of one of the types or looks like it, else a string."""
    written = _WORDS.get(text, text.strip())
    try:
        value: Any = _DECODER.decode(written)
    except (ValueError, RecursionError):
        value = text
    kind = _OF_JSON[type(value)]
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        kind = "integer"
    if kind == "integer" and "number" in kinds:
        kind = "number"
    if kind == "string" or kind not in (kinds or ("object", "array")):
        return json.dumps(text, ensure_ascii=False)
    return written
