"""Reading JSON that somebody else wrote: bounded, typed, and every error one line that names file and field.

`parse_json` accepts what JSON defines and nothing else. `read_value` reads one value as a type hint says:
`int`, `float`, `str`, `bool`, `X | None`, `Literal`, lists, tuples, dictionaries, frozen dataclasses, and `Annotated`
with a `Between` or a `Pattern`. `read_record` reads a dataclass by its own hints, `Fields` single entries of an object.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import stat
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from ddtree_trt.errors import DDTreeError, Shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_JSON_BYTES = 4 << 20  # of a configuration or manifest; real ones have some kilobytes
MAX_NESTING = 64  # levels of objects and lists; real files have less than ten
_SHOWN_CHARACTERS = 120  # of a foreign value in one message
_T = TypeVar("_T", bound="DataclassInstance")


class _ShownJson(Shown):
    """Values as JSON writes them: true, false, null."""

    def __init__(self) -> None:
        super().__init__(_SHOWN_CHARACTERS)
        self.maxlevel, self.maxlist, self.maxdict, self.maxtuple = 2, 6, 4, 6
        self.maxstring = self.maxlong = self.maxother = 60

    def repr_bool(self, value: bool, level: int) -> str:
        return str(value).lower()

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"


shown = _ShownJson()  # a JSON value for a message, control characters escaped


def printable(text: str) -> str:
    """The text with every unprintable character escaped, line ends included: it can neither move a terminal's cursor
    nor begin a new line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


@dataclass(frozen=True)
class Between:
    """Bounds of a number, both included."""

    lowest: float
    highest: float

    def __contains__(self, value: float) -> bool:
        return self.lowest <= value <= self.highest

    def __str__(self) -> str:
        return f"{self.lowest:g} to {self.highest:g}" if self.highest >= 1e9 else f"{self.lowest} to {self.highest}"


@dataclass(frozen=True)
class Pattern:
    """A regular expression that must match a whole text."""

    expression: str
    meaning: str  # for the message


@dataclass(frozen=True)
class Source:
    """The file that is read, and how its faults are reported."""

    where: str
    error: type[DDTreeError]
    advice: str  # what to do about a fault

    def fault(self, problem: str) -> DDTreeError:
        """The error for a problem, which is a whole sentence or begins with the name of a field."""
        return self.error(f"{self.where}: {printable(problem)}; {self.advice}")


def read_json(path: Path, source: Source, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The content of a JSON file in UTF-8 of at most `max_bytes`. Raises the source's error."""
    try:
        with open(path, "rb", opener=_open_without_blocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise source.fault("it is not a regular file")
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise source.fault(f"it cannot be read ({error.strerror or error})") from error
    if len(data) > max_bytes:
        raise source.fault(f"it has more than {max_bytes >> 20} MiB")
    return parse_json(data, source)


def _open_without_blocking(path: str, flags: int) -> int:
    """Open without blocking: opening a pipe would wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def read_object(path: Path, source: Source, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """`read_json` of a file that holds an object."""
    data = read_json(path, source, max_bytes=max_bytes)
    if not isinstance(data, dict):
        raise source.fault(f"it is not a JSON object but {shown(data)}")
    return data


def parse_json(data: bytes | str, source: Source, max_nesting: int = MAX_NESTING) -> Any:
    """JSON without Python's extensions: no NaN, no Infinity, no number that overflows, no name twice in an object,
    at most `max_nesting` levels of objects and lists. Raises the source's error."""
    too_deep = f"it is not valid JSON: nested too deeply, at most {max_nesting} levels are read"
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_no_repeated_names)
    except RecursionError as error:
        raise source.fault(too_deep) from error
    except ValueError as error:  # bytes that are no UTF-8 and integers of more than 4,300 digits, too
        raise source.fault(f"it is not valid JSON: {_cut(str(error))}") from error
    if _is_nested_deeper(value, max_nesting):
        raise source.fault(too_deep)
    return value


def _is_nested_deeper(value: Any, levels: int) -> bool:
    """Whether a value has more levels of objects and lists; without recursion, which would itself be too deep."""
    level = [value]
    for _ in range(levels + 1):
        level = [v for v in level if isinstance(v, dict | list)]
        if not level:
            return False
        level = [child for v in level for child in (v.values() if isinstance(v, dict) else v)]
    return True


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {_cut(text)} is too large")
    return value


def _no_repeated_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{shown(name)} is there twice")
        found[name] = value
    return found


def read_record(cls: type[_T], data: Any, source: Source, path: str = "", **kinds: Any) -> _T:
    """A frozen dataclass from a JSON object that has its fields and no others; `kinds` narrows a field's type.

    `path` is where in the file it is, for messages. Raises the source's error.
    """
    if not isinstance(data, dict):
        raise source.fault(f"{path or 'it'} must be an object, found {shown(data)}")
    required, hints = _layout(cls)
    unknown, missing = sorted(data.keys() - hints.keys()), sorted(required - data.keys())
    if unknown or missing:
        raise source.fault(f"{path or 'it'} has unknown fields {shown(unknown)}, lacks fields {shown(missing)}")
    hints = hints | kinds
    return cls(**{name: read_value(hints[name], value, source, _join(path, name)) for name, value in data.items()})


@functools.cache
def _layout(cls: type[Any]) -> tuple[frozenset[str], dict[str, Any]]:
    """The names of a dataclass's required fields, and the types of all."""
    fields, hints = dataclasses.fields(cls), typing.get_type_hints(cls, include_extras=True)
    required = (f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING)
    return frozenset(required), {f.name: hints[f.name] for f in fields}


def read_value(kind: Any, value: Any, source: Source, path: str) -> Any:
    """One JSON value as the type `kind`. Raises the source's error."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return _read_within(args[0], args[1], value, source, path)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return read_record(kind, value, source, path)
    if origin in (types.UnionType, typing.Union):  # only `X | None` is used
        return None if value is None else read_value(args[0], value, source, path)
    if origin is dict and isinstance(value, dict):
        return {
            read_value(args[0], k, source, f"{path}: the name"): read_value(args[1], v, source, _join(path, k))
            for k, v in value.items()
        }
    if origin is list and isinstance(value, list):
        return [read_value(args[0], v, source, f"{path}[{i}]") for i, v in enumerate(value)]
    if origin is tuple and isinstance(value, list) and (args[-1] is Ellipsis or len(args) == len(value)):
        items = [args[0]] * len(value) if args[-1] is Ellipsis else args
        read = (read_value(k, v, source, f"{path}[{i}]") for i, (k, v) in enumerate(zip(items, value, strict=True)))
        return tuple(read)
    if origin is Literal and isinstance(value, str | int) and value in args:
        return value
    if kind is float and type(value) is int and abs(value) < 1 << 1000:
        return float(value)
    if type(value) is kind:
        return value
    raise source.fault(f"{path} must be {_named(kind)}, found {shown(value)}")


def _read_within(kind: Any, limit: Any, value: Any, source: Source, path: str) -> Any:
    """One JSON value of type `kind` within a `Between` or a `Pattern`, which the message states with the type."""
    numeric = isinstance(limit, Between)
    right = type(value) in ((int, float) if kind is float else (kind,))
    if right and (value in limit if numeric else re.fullmatch(limit.expression, value)):
        return kind(value)
    expected = f"{_named(kind)} from {limit}" if numeric else limit.meaning
    raise source.fault(f"{path} must be {expected}, found {shown(value)}")


_NAMES = {int: "an integer", float: "a number", str: "a text", bool: "true or false", dict: "an object", list: "a list"}


def _named(kind: Any) -> str:
    """A type hint in words."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple and args[-1] is not Ellipsis:
        return f"a list of {len(args)} entries"
    return _NAMES.get(list if origin is tuple else origin or kind, str(kind))


def _join(path: str, name: str) -> str:
    name = name if name.isidentifier() and len(name) <= _SHOWN_CHARACTERS else shown(name)
    return f"{path}.{name}" if path else name


_REQUIRED: Any = object()


@dataclass(frozen=True)
class Fields:
    """Typed access to the entries of one JSON object. An entry that is absent or null takes the default, or is a fault
    where there is none."""

    data: dict[str, Any]
    source: Source
    path: str = ""  # where in the file the object is

    def value(self, name: str, kind: Any, default: Any = _REQUIRED) -> Any:
        """A value of the type `kind`, as `read_value` takes it."""
        if not self.has(name) and default is not _REQUIRED:
            return default
        if name not in self.data:
            raise self.source.fault(f"{self.path or 'it'} has no {name}")
        return read_value(kind, self.data[name], self.source, self.place(name))

    def place(self, name: str) -> str:
        """The full name of an entry."""
        return _join(self.path, name)

    def integer(self, name: str, within: Between, default: int = _REQUIRED) -> int:
        return self.value(name, Annotated[int, within], default)

    def number(self, name: str, within: Between, default: float = _REQUIRED) -> float:
        return self.value(name, Annotated[float, within], default)

    def text(self, name: str, default: str = _REQUIRED) -> str:
        return self.value(name, str, default)

    def flag(self, name: str, default: bool) -> bool:
        return self.value(name, bool, default)

    def optional(self, name: str, kind: Any) -> Any:
        """A value of the type `kind`, or None where the entry is absent or null."""
        return self.value(name, kind, None)

    def section(self, name: str) -> Fields:
        """An object within this one; empty where it is absent or null."""
        return Fields(self.optional(name, dict[str, Any]) or {}, self.source, self.place(name))

    def has(self, name: str) -> bool:
        """Whether the entry is present and not null."""
        return self.data.get(name) is not None

    def fault(self, name: str, problem: str) -> DDTreeError:
        """The error for one entry; its text is the entry's full name, then `problem`."""
        return self.source.fault(f"{self.place(name)} {problem}")
