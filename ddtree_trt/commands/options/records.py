"""Options of a command made from records (`ddtree_trt/records.py`) and from the sampling parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer

from ddtree_trt.commands.options.sampling import SAMPLING_OPTIONS, take_sampling
from ddtree_trt.errors import UsageError
from ddtree_trt.records import Option, flag_of, options

_Command = Callable[..., None]
SAMPLING = "sampling"  # the argument of a command for the sampling parameters


def with_options(**chosen: Sequence[str]) -> Callable[[_Command], _Command]:
    """Give a command an option for each option of the records that its arguments are, and in the place of an argument
    `sampling` one for each sampling parameter; that argument gets those given, by field of `SamplingParams`.

    `chosen`: of an argument's record, the only fields that the command has. An argument that may be None is None where
    its record's first option is not given, which the others then need.
    """

    def decorate(command: _Command) -> _Command:
        parameters: list[inspect.Parameter] = []
        records: dict[str, tuple[type, bool]] = {}
        taken = inspect.signature(command, eval_str=True).parameters
        for parameter in taken.values():
            kinds = get_args(parameter.annotation) or (parameter.annotation,)
            record = next((kind for kind in kinds if is_dataclass(kind) and isinstance(kind, type)), None)
            if parameter.name == SAMPLING:
                parameters += SAMPLING_OPTIONS
            elif record is None:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))  # as Typer calls it
            else:
                records[parameter.name] = record, NoneType in kinds
                rows = _rows(record, chosen.get(parameter.name))
                parameters += (_parameter(*row, NoneType in kinds) for row in rows)

        @functools.wraps(command)
        def with_records(**values: Any) -> None:
            made = {name: _make(record, optional, values) for name, (record, optional) in records.items()}
            if SAMPLING in taken:
                made[SAMPLING] = take_sampling(values)
            command(**values, **made)

        with_records.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_records.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_records

    return decorate


def _rows(record: type, wanted: Sequence[str] | None) -> list[tuple[str, Option, Any, Any]]:
    """Field, option, type and default of a record's options, inherited ones last."""
    own = inspect.get_annotations(record)
    rows = [(name, *row) for name, row in options(record).items() if wanted is None or name in wanted]
    return sorted(rows, key=lambda row: row[0] not in own)


def _parameter(name: str, found: Option, kind: Any, default: Any, optional: bool) -> inspect.Parameter:
    flag = flag_of(name, found)
    kinds = get_args(kind) or (kind,)
    switch = bool in kinds
    if switch and default is not False:
        flag += f"/--no-{flag[2:]}"
    made = typer.Option(flag, metavar=None if switch else found.metavar or None, help=found.help, envvar=found.envvar)
    if get_origin(kind) is tuple:
        kind, default = list[str] | None, None
    elif str in kinds and Path in kinds:
        kind = str | None
    annotation: Any = Annotated[kind | None if optional else kind, made]
    default = None if optional else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _make(record: type, optional: bool, values: dict[str, Any]) -> Any:
    """The record of a command's values, which are taken out of them."""
    given = {name: values.pop(name) for name in options(record) if name in values}
    if optional:
        first, *others = given
        if given[first] is None:
            for name in others:
                if given[name] is not None:
                    raise UsageError(f"--{name.replace('_', '-')} needs --{first.replace('_', '-')}")
            return None
    repeated = {name for name, (_, kind, _) in options(record).items() if get_origin(kind) is tuple}
    given = {name: tuple(value) if name in repeated and value else value for name, value in given.items()}
    # What was not given has the record's default.
    return record(**{name: value for name, value in given.items() if value is not None})
