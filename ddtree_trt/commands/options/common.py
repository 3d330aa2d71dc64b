"""Arguments and options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EngineDirectory = Annotated[Path, typer.Argument(metavar="ENGINE_DIR", help="An engine directory.")]
NewestByDefault = Annotated[
    Path | None, typer.Argument(metavar="ENGINE_DIR", help="Default: the newest engine under engines/.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
