"""Arguments and options of commands, made from records (`ddtree_trt/records.py`) and the sampling parameters."""

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer

from ddtree_trt.errors import UsageError, shown
from ddtree_trt.records import Option, flag_of, options
from ddtree_trt.runtime.decoding.methods import AUTO, METHODS
from ddtree_trt.runtime.params import PARAMETERS
from ddtree_trt.runtime.structured.record import STRUCTURED, StructuredOutput

EngineDirectory = Annotated[Path, typer.Argument(metavar="ENGINE_DIR", help="An engine directory.")]
NewestByDefault = Annotated[Path | None, typer.Argument(metavar="ENGINE_DIR", help="Default: the newest of engines/.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

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
                parameters += _SAMPLING_OPTIONS
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
                made[SAMPLING] = _take_sampling(values)
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


def _parameter(name: str, found: Option, kind: Any, default: Any, optional: bool = True) -> inspect.Parameter:
    """`optional`: None where it is not given."""
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
            if needing := next((name for name in others if given[name] is not None), None):
                raise UsageError(f"{flag_of(needing)} needs {flag_of(first)}")
            return None
    # What was not given has the record's default; a list is that of a repeated option.
    stated = {name: value for name, value in given.items() if value is not None and value != []}
    return record(**{name: tuple(value) if isinstance(value, list) else value for name, value in stated.items()})


# The sampling parameters, those of drafting first

_PARAMETERS = sorted(
    (row for row in PARAMETERS.values() if row.metavar is not None),
    key=lambda row: row.name not in ("method", "tree_budget"),
)
_CONSTRAINTS = {  # field of StructuredOutput → its type and option
    "json_schema": (str, Option("Make the output JSON of this schema.", "FILE|JSON")),
    "json_object": (bool, Option("Make the output a JSON object.")),
    "regex": (str, Option("Make the output match this expression as a whole.", "REGEX")),
    "choice": (tuple[str, ...], Option("Make the output one of these texts; repeatable.", "TEXT")),
    "grammar": (str, Option("Make the output a text of this grammar, in Lark or GBNF.", "FILE|TEXT")),
}
_FILES, _WORDS, _RULE = ("json_schema", "grammar"), ("true", "false"), re.compile(r"\n|: |::=")


def _sampling_options() -> Iterator[inspect.Parameter]:
    for row in _PARAMETERS:
        kind, text = row.type, row.help
        if row.name == "method":
            *others, last = METHODS
            text = f"{AUTO} (default), {', '.join(others)} or {last}."
        elif get_origin(kind) is tuple:
            text = f"{text.removesuffix('.')}; repeatable."
        elif isinstance(row.default, str):
            kind = str  # a number or auto
        yield _parameter(row.name, Option(text, row.metavar or ""), kind, row.default)
    for name, (kind, option) in _CONSTRAINTS.items():
        yield _parameter(name, option, kind, False)


_SAMPLING_OPTIONS = tuple(_sampling_options())


def _take_sampling(values: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters that a command's options state, by field of `SamplingParams`; taken out of `values`."""
    given: dict[str, Any] = {}
    for row in _PARAMETERS:
        if (value := values.pop(row.name)) not in (None, []):
            given[row.name] = value
        if row.type is int and isinstance(value, str) and value != row.default:
            try:
                given[row.name] = int(value)
            except ValueError:
                raise UsageError(f"{flag_of(row.name)} must be a number or auto, not {shown(value)}") from None
    taken = {name: values.pop(name) for name in _CONSTRAINTS}
    constraints = {name: value for name, value in taken.items() if value not in (False, None, [])}
    if len(constraints) > 1:
        first, second = [*map(flag_of, constraints)][:2]
        raise UsageError(f"{first} and {second} are two constraints on the output; give one")
    for name, text in constraints.items():
        # What begins a schema or a rule is no file's name.
        if name in _FILES and not (text.lstrip()[:1] in ("{", "[") or text in _WORDS or _RULE.search(text)):
            constraints[name] = read_file(flag_of(name), text, "name a file, or give the text")
    return given | ({STRUCTURED: StructuredOutput.from_mapping(constraints)} if constraints else {})


def read_file(option: str, path: str | Path, advice: str) -> str:
    """The text of a file that an option names. Raises UsageError, with the advice."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"{option} {shown(str(path))[1:-1]} cannot be read ({why}); {advice}") from error
