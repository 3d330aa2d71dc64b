"""Reading values that somebody else wrote: typed by pydantic, and every error one line that names file and field.

Records are plain frozen dataclasses whose type hints say what their fields may hold: `Annotated` with a `Between`, a
`Pattern`, an `After` or an `Expected` narrows a type. pydantic checks them strictly ("5" is not 5) and refuses unknown
fields; it is imported when the first value is checked. `read_record` reads a record from JSON, `Fields` single entries
of an object, and `check_fields` checks a record that is made in Python.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import stat
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from ddtree_trt.errors import DDTreeError, Shown, UsageError
from ddtree_trt.errors import shown as shown_python

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema, ErrorDetails

MAX_JSON_BYTES = 4 << 20  # of a configuration or manifest; real ones have some kilobytes
_SHOWN_CHARACTERS = 120  # of a foreign value in one message
_PROBLEM_CHARACTERS = 1000
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


# What narrows a type


def _must_be(words: str, schema: CoreSchema) -> CoreSchema:
    from pydantic_core import core_schema

    text = words.replace("{", "(").replace("}", ")")
    return core_schema.custom_error_schema(schema, "expected", custom_error_message=f"must be {text}")


@dataclass(frozen=True)
class Expected:
    """What a value must be, in words, for a type whose own error would say less."""

    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _must_be(self.words, handler(source))


@dataclass(frozen=True)
class Between:
    """Bounds of a number, both included."""

    lowest: float
    highest: float

    def __contains__(self, value: float) -> bool:
        return self.lowest <= value <= self.highest

    def __str__(self) -> str:
        return " to ".join(str(n) if isinstance(n, int) else f"{n:g}" for n in (self.lowest, self.highest))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = {**handler(source), "ge": self.lowest, "le": self.highest}
        return _must_be(f"{_NAMES[f'{source.__name__}_type']} from {self}", schema)


@dataclass(frozen=True)
class After:
    """A function of a value that has the type, or of any value before that is checked. It returns the value to keep, or
    raises ValueError with what it must be, or UsageError with a whole sentence."""

    function: Callable[[Any], Any]
    before: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema as make

        wrap = make.no_info_before_validator_function if self.before else make.no_info_after_validator_function
        return wrap(self.function, handler(source))


Before = functools.partial(After, before=True)


@dataclass(frozen=True)
class Pattern:
    """A regular expression that must match a whole text."""

    expression: str
    meaning: str  # for the message

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        # Python's expressions, not pydantic's own, which has no \Z.
        schema = core_schema.str_schema(pattern=rf"^(?:{self.expression})\Z", regex_engine="python-re", strict=True)
        return _must_be(self.meaning, schema)


_NAMES = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "dict_type": "an object",
    "list_type": "a list",
    "tuple_type": "a list",
    "dataclass_type": "an object",
}


def problem_of(error: ErrorDetails, shown: Callable[[object], str] = shown, found: str = "found") -> str:
    """What is wrong with a value that pydantic refused, to stand behind its name."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return "is unknown"
    if kind in ("too_long", "string_too_long"):
        return f"has more than {context['max_length']} {'characters' if 'string' in kind else 'entries'}"
    if kind == "value_error":
        problem = str(context["error"])
    elif kind == "literal_error":
        problem = f"must be {context['expected']}"
    elif kind == "dataclass_exact_type":
        problem = f"must be a {context['class_name']}"
    else:
        problem = f"must be {_NAMES[kind]}" if kind in _NAMES else error["msg"]
    return f"{problem}, {found} {shown(error['input'])}" if problem.startswith("must ") else problem


def place_of(loc: tuple[int | str, ...], path: str = "") -> str:
    """The name of the value that pydantic refused, below `path`."""
    is_key = loc[-1:] == ("[key]",)
    for part in loc[:-2] if is_key else loc:
        path = f"{path}[{part}]" if isinstance(part, int) else _join(path, part)
    return f"{path}: a key" if is_key else path


def _join(path: str, name: str) -> str:
    name = name if name.isidentifier() and len(name) <= _SHOWN_CHARACTERS else shown(name)
    return f"{path}.{name}" if path else name


@dataclass(frozen=True)
class Source:
    """The file that is read, and how its faults are reported."""

    where: str
    error: type[DDTreeError]
    advice: str  # what to do about a fault

    def fault(self, problem: str) -> DDTreeError:
        """The error for a problem, which is a whole sentence or begins with the name of a field."""
        return self.error(f"{self.where}: {printable(problem[:_PROBLEM_CHARACTERS])}; {self.advice}")


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter

    # In a tuple, because pydantic takes no configuration for a bare dataclass; one within it inherits this.
    return TypeAdapter(tuple[kind], config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))


@functools.cache
def _fields_of(cls: type[Any], **kinds: Any) -> Any:
    """The dataclass as a type of dictionaries."""
    from typing import NotRequired

    from typing_extensions import TypedDict

    hints = typing.get_type_hints(cls, include_extras=True) | kinds
    optional = {f.name for f in dataclasses.fields(cls) if (f.default, f.default_factory) != (dataclasses.MISSING,) * 2}
    names = [f.name for f in dataclasses.fields(cls)]
    fields = {name: NotRequired[hints[name]] if name in optional else hints[name] for name in names}
    return TypedDict(cls.__name__, fields)  # type: ignore[operator]


def check_fields(record: DataclassInstance, within: str = "") -> None:
    """Check a frozen dataclass that was made in Python, in its `__post_init__`, and keep the values as its hints have
    them. Raises UsageError, whose text begins with the name of the field at fault, behind `within`."""
    from pydantic import ValidationError

    try:
        (values,) = _adapter(_fields_of(type(record))).validate_python((record.__dict__,))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raised = first.get("ctx", {}).get("error")
        if isinstance(raised, UsageError):  # by a function over a value
            raise raised from None
        problem = problem_of(first, shown_python, "not")
        raise UsageError(f"{within}{place_of(first['loc'][1:])} {problem}") from None
    record.__dict__.update(values)


def read_json(path: Path, source: Source, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The content of a JSON file in UTF-8 of at most `max_bytes`. Raises the source's error."""
    try:
        # Opening a pipe would wait for its writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise source.fault("it is not a regular file")
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise source.fault(f"it cannot be read ({error.strerror or error})") from error
    if len(data) > max_bytes:
        raise source.fault(f"it has more than {max_bytes >> 20} MiB")
    return parse_json(data, source)


def read_object(path: Path, source: Source, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    data = read_json(path, source, max_bytes=max_bytes)
    if not isinstance(data, dict):
        raise source.fault(f"it is not a JSON object but {shown(data)}")
    return data


def parse_json(data: bytes | str, source: Source) -> Any:
    """JSON without NaN and Infinity, of at most 200 levels of objects and lists. Raises the source's error."""
    from pydantic_core import from_json

    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise source.fault(f"it is not valid JSON: {error}") from error


def read_record(cls: type[_T], data: Any, source: Source, path: str = "", **kinds: Any) -> _T:
    """A frozen dataclass from a JSON object that has its fields and no others; `kinds` narrows a field's type. `path`
    is where in the file it is, for messages. Raises the source's error."""
    if not isinstance(data, dict):
        raise source.fault(f"{path or 'it'} must be an object, found {shown(data)}")
    return cls(**read_value(_fields_of(cls, **kinds), data, source, path))


def read_value(kind: Any, value: Any, source: Source, path: str) -> Any:
    """One JSON value as the type `kind`. Raises the source's error."""
    from pydantic import ValidationError

    try:
        # As JSON, whose lists are tuples and whose objects are records where the type says so.
        return _adapter(kind).validate_json(f"[{json.dumps(value)}]")[0]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = place_of(first["loc"][1:], path)
        raise source.fault(f"{place} {problem_of(first)}") from None


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
        return _join(self.path, name)

    def advising(self, advice: str) -> Fields:
        """The same, whose faults have other advice than the source's."""
        return dataclasses.replace(self, source=dataclasses.replace(self.source, advice=advice))

    def integer(self, name: str, within: Between, default: int = _REQUIRED) -> int:
        return self.value(name, Annotated[int, within], default)

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
        return self.data.get(name) is not None

    def fault(self, name: str, problem: str) -> DDTreeError:
        """The error for one entry; its text is the entry's full name, then `problem`."""
        return self.source.fault(f"{self.place(name)} {problem}")
