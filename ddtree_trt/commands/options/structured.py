"""Options of a command for the constraint on the output."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ddtree_trt.errors import UsageError, shown
from ddtree_trt.runtime.structured.record import MAX_CHARACTERS, StructuredOutput

# Option → the field of StructuredOutput, the type, the placeholder and the help.
_OPTIONS: dict[str, tuple[str, Any, str, str]] = {
    "json_schema": ("json_schema", str | None, "FILE|JSON", "Make the output JSON of this schema."),
    "json_object": ("json_object", bool, "", "Make the output a JSON object."),
    "regex": ("regex", str | None, "REGEX", "Make the output match this expression as a whole."),
    "choices": ("choice", list[str] | None, "TEXT", "Make the output one of these texts; repeatable."),
    "grammar": ("grammar", str | None, "FILE|TEXT", "Make the output a text of this grammar, in Lark or GBNF."),
}
_FILES = ("json_schema", "grammar")


def _option(name: str) -> inspect.Parameter:
    field, kind, metavar, text = _OPTIONS[name]
    option = typer.Option(f"--{field.replace('_', '-')}", metavar=metavar or None, help=text)
    default = False if kind is bool else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


STRUCTURED_OPTIONS = [_option(name) for name in _OPTIONS]


def take_structured(values: dict[str, Any]) -> StructuredOutput | None:
    """The constraint that a command's options state, which are taken out of `values`; None where there is none."""
    taken = {_OPTIONS[name][0]: values.pop(name) for name in _OPTIONS}
    given = {field: value for field, value in taken.items() if value}
    if len(given) > 1:
        first, second = (f"--{field.replace('_', '-')}" for field in list(given)[:2])
        raise UsageError(f"{first} and {second} are two constraints on the output; give one")
    for field in _FILES:
        if field in given:
            given[field] = _text(field, given[field])
    return StructuredOutput.from_mapping(given) if given else None


def _text(field: str, given: str) -> str:
    """A text given as it is, or as the name of a file that has it."""
    option = f"--{field.replace('_', '-')}"
    if _is_text(field, given):
        return given
    try:
        with Path(given).open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"{option}: {shown(given)} cannot be read ({why}); name a file, or give the text") from error
    return text


def _is_text(field: str, given: str) -> bool:
    """Whether it is no file's name: a schema is JSON, and a grammar has a rule."""
    if field == "grammar":
        return "\n" in given or ": " in given or "::=" in given
    try:
        json.loads(given)
    except (ValueError, RecursionError):
        return given.lstrip().startswith("{")
    return True
