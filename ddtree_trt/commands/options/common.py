"""Arguments and options shared by several commands; each command states its default."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from ddtree_trt.errors import UsageError

_Number = TypeVar("_Number", int, float)

EngineDirectory = Annotated[Path, typer.Argument(metavar="ENGINE_DIR", help="An engine directory.")]
NewestByDefault = Annotated[
    Path | None, typer.Argument(metavar="ENGINE_DIR", help="Default: the newest engine under engines/.")
]
Exact = Annotated[
    bool | None,
    typer.Option(
        "--exact/--no-exact",
        help="CPU engines: every method gives the tokens of ar, bit for bit. Default: int8 only.",
    ),
]
TensorParallelSize = Annotated[
    int,
    typer.Option(metavar="N", help="torch engines: GPUs over which the target is split, each with a process."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def listing(values: Iterable[object]) -> str:
    """Values as an option's list."""
    return ",".join(map(str, values))


def words(text: str | None) -> tuple[str, ...] | None:
    """The items of an option's list; None where it was not given."""
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip())


def numbers(option: str, text: str | None, kind: Callable[[str], _Number]) -> tuple[_Number, ...] | None:
    """The numbers of an option's list; None where it was not given. Raises UsageError for anything else."""
    given = words(text)
    try:
        return None if given is None else tuple(kind(word) for word in given)
    except ValueError:
        raise UsageError(f"{option} must be numbers separated by commas, not {text!r}") from None
