"""Options of a command for the sampling parameters, made from their table."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ddtree_trt.commands.options.structured import STRUCTURED_OPTIONS, take_structured
from ddtree_trt.errors import UsageError, shown
from ddtree_trt.runtime.decoding.methods import AUTO, METHODS
from ddtree_trt.runtime.params import PARAMETERS, Parameter
from ddtree_trt.runtime.structured.names import STRUCTURED

# The options of drafting come first.
_OPTIONS = sorted(
    (row for row in PARAMETERS.values() if row.metavar is not None),
    key=lambda row: row.name not in ("method", "tree_budget"),
)


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each sampling parameter that has one, in the place of its argument `sampling`.

    That argument gets the values given, by field of `SamplingParams`.
    """
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        by_name = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)  # as Typer calls it
        parameters += [*map(_option, _OPTIONS), *STRUCTURED_OPTIONS] if parameter.name == "sampling" else [by_name]

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        given = {row.name: _value(row, values.pop(row.name)) for row in _OPTIONS}
        given[STRUCTURED] = take_structured(values)
        command(**values, sampling={name: value for name, value in given.items() if value is not None})

    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def _option(row: Parameter) -> inspect.Parameter:
    text = row.help
    if row.name == "method":
        *others, last = METHODS
        text = f"{AUTO} (default), {', '.join(others)} or {last}."
    kind: Any = row.type | None
    if row.type == tuple[str, ...]:
        kind, text = list[str] | None, f"{text.removesuffix('.')}; repeatable."
    elif row.type is bool:
        kind = bool
    elif isinstance(row.default, str):
        kind = str | None
    option = typer.Option(row.option, metavar=row.metavar or None, help=text)
    default = False if kind is bool else None
    return inspect.Parameter(
        row.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _value(row: Parameter, value: Any) -> Any:
    """An option's value as SamplingParams takes it; None where it was not given."""
    if row.type is int and isinstance(value, str) and value != row.default:
        try:
            return int(value)
        except ValueError:
            raise UsageError(f"{row.option} must be a number or auto, not {shown(value)}") from None
    return value if row.type not in (bool, tuple[str, ...]) else value or None
