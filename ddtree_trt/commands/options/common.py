"""Arguments and options shared by several commands."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

EngineDirectory = Annotated[Path, typer.Argument(metavar="ENGINE_DIR", help="An engine directory.")]
NewestByDefault = Annotated[
    Path | None, typer.Argument(metavar="ENGINE_DIR", help="Default: the newest engine under engines/.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def listing(values: Iterable[object]) -> str:
    """Values as an option's list."""
    return ",".join(map(str, values))


def words(text: str | None) -> tuple[str, ...] | None:
    """The items of an option's list; None where it was not given."""
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip())
