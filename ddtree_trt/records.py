"""Options in records: a frozen dataclass states each option's default, bounds and help once.

`check` holds a record to them, and `commands/arguments.py` makes the options of a command of its fields.
"""

import dataclasses
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ddtree_trt.errors import UsageError, check_range, shown

_Record = TypeVar("_Record")


@dataclass(frozen=True)
class Option:
    """What a field's option is, besides its default and type."""

    help: str  # of the command line, in a sentence
    metavar: str = "N"
    within: tuple[float, float] | None = None  # of a number: lowest and highest
    flag: str | None = None  # the option, where it is not made of the field's name
    only: tuple[str, ...] = ()  # backends whose engines have it; none: all have
    envvar: str | None = None  # gives its value too


def option(default: Any, text: str, metavar: str = "N", **more: Any) -> Any:
    """A field that is an option, whose help is `text`; `more` are other fields of `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(text, metavar, **more)})


def options(record: type) -> dict[str, tuple[Option, Any, Any]]:
    """A record's options by field: the option, the field's type and its default."""
    types, fields = get_type_hints(record), dataclasses.fields(record)
    return {f.name: (f.metadata["option"], types[f.name], f.default) for f in fields if "option" in f.metadata}


def flag_of(name: str, found: Option | None = None) -> str:
    """The option of a field: its name without the unit of seconds, or one of its own."""
    return (found and found.flag) or f"--{name.removesuffix('_s').replace('_', '-')}"


def choices(kind: Any) -> tuple[str, ...]:
    """The texts that a field of this type takes; none where it takes others too."""
    return get_args(kind) if get_origin(kind) is Literal else ()


def check(record: Any) -> None:
    """Raises UsageError where an option's value is out of range, not among the choices, or of another type."""
    for name, (found, kind, _) in options(type(record)).items():
        value, kinds = getattr(record, name), get_args(kind) or (kind,)
        if value is None and NoneType in kinds:
            continue
        if known := choices(kind):
            if value not in known:
                raise UsageError(f"{name} must be one of {', '.join(known)}, not {shown(value)}")
        elif found.within:
            check_range(name, value, *found.within)
            if float not in kinds and not isinstance(value, int):
                raise UsageError(f"{name} must be a whole number, not {shown(value)}")
        elif bool in kinds and not isinstance(value, bool):
            raise UsageError(f"{name} must be True or False, not {shown(value)}")


def misplaced_option(record: type, given: Any, backend: str) -> tuple[str, str] | None:
    """Of a record's options that were given: the first that this backend does not have, by its flag, and the backends
    that have it. None where there is none."""
    for name, (found, _, default) in options(record).items():
        if found.only and backend not in found.only and getattr(given, name) != default:
            return flag_of(name, found), " or ".join(found.only)
    return None


def with_fields(record: type[_Record], given: _Record | None, fields: dict[str, Any]) -> _Record:
    """A record with some fields over `given`, or over the defaults. Raises UsageError for a name that it lacks."""
    known = [field.name for field in dataclasses.fields(record)]  # type: ignore[arg-type]
    if unknown := sorted({*fields} - {*known}):
        raise UsageError(f"unknown option {shown(unknown[0])[1:-1]}; known are {', '.join(known)}")
    return dataclasses.replace(given or record(), **fields)  # type: ignore[type-var]
