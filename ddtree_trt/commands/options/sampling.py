"""Options of a command for the sampling parameters, made from their table, and for the constraint on the output."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ddtree_trt.errors import UsageError, shown
from ddtree_trt.runtime.decoding.methods import AUTO, METHODS
from ddtree_trt.runtime.params import PARAMETERS, Parameter
from ddtree_trt.runtime.structured.names import STRUCTURED
from ddtree_trt.runtime.structured.record import MAX_CHARACTERS, StructuredOutput

# The options of drafting come first.
_ROWS = sorted(
    (row for row in PARAMETERS.values() if row.metavar is not None),
    key=lambda row: row.name not in ("method", "tree_budget"),
)
# Field of StructuredOutput → the type, the placeholder and the help.
_CONSTRAINTS: dict[str, tuple[Any, str, str]] = {
    "json_schema": (str | None, "FILE|JSON", "Make the output JSON of this schema."),
    "json_object": (bool, "", "Make the output a JSON object."),
    "regex": (str | None, "REGEX", "Make the output match this expression as a whole."),
    "choice": (list[str] | None, "TEXT", "Make the output one of these texts; repeatable."),
    "grammar": (str | None, "FILE|TEXT", "Make the output a text of this grammar, in Lark or GBNF."),
}
_FILES = ("json_schema", "grammar")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _option(name: str, kind: Any, metavar: str | None, text: str) -> inspect.Parameter:
    made = Annotated[kind, typer.Option(_flag(name), metavar=metavar or None, help=text)]
    default = False if kind is bool else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=made)


def _sampling_option(row: Parameter) -> inspect.Parameter:
    kind, text = row.type | None, row.help
    if row.name == "method":
        *others, last = METHODS
        text = f"{AUTO} (default), {', '.join(others)} or {last}."
    if row.type == tuple[str, ...]:
        kind, text = list[str] | None, f"{text.removesuffix('.')}; repeatable."
    elif row.type is bool:
        kind = bool
    elif isinstance(row.default, str):
        kind = str | None
    return _option(row.name, kind, row.metavar, text)


SAMPLING_OPTIONS = [*map(_sampling_option, _ROWS), *(_option(name, *row) for name, row in _CONSTRAINTS.items())]


def take_sampling(values: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters that a command's options state, by field of `SamplingParams`; taken out of `values`."""
    given = {row.name: _value(row, values.pop(row.name)) for row in _ROWS}
    given[STRUCTURED] = _take_structured(values)
    return {name: value for name, value in given.items() if value is not None}


def _value(row: Parameter, value: Any) -> Any:
    """An option's value as SamplingParams takes it; None where it was not given."""
    if row.type is int and isinstance(value, str) and value != row.default:
        try:
            return int(value)
        except ValueError:
            raise UsageError(f"{_flag(row.name)} must be a number or auto, not {shown(value)}") from None
    return value if row.type not in (bool, tuple[str, ...]) else value or None


def _take_structured(values: dict[str, Any]) -> StructuredOutput | None:
    taken = {name: values.pop(name) for name in _CONSTRAINTS}
    given = {name: value for name, value in taken.items() if value}
    if len(given) > 1:
        first, second = [*map(_flag, given)][:2]
        raise UsageError(f"{first} and {second} are two constraints on the output; give one")
    for name in given.keys() & {*_FILES}:
        if not _is_text(name, given[name]):
            given[name] = _read(_flag(name), given[name])
    return StructuredOutput.from_mapping(given) if given else None


def _is_text(name: str, given: str) -> bool:
    """Whether it is no file's name: a schema is JSON, and a grammar has a rule."""
    if name == "grammar":
        return "\n" in given or ": " in given or "::=" in given
    try:
        json.loads(given)
    except (ValueError, RecursionError):
        return given.lstrip().startswith("{")
    return True


def _read(option: str, path: str) -> str:
    try:
        with Path(path).open(encoding="utf-8") as file:
            return file.read(MAX_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"{option}: {shown(path)} cannot be read ({why}); name a file, or give the text") from error
