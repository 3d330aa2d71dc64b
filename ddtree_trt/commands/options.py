"""Arguments and options shared by several commands; each command states its default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EngineDirectory = Annotated[Path, typer.Argument(metavar="ENGINE_DIR", help="An engine directory.")]
NewestByDefault = Annotated[
    Path | None, typer.Argument(metavar="[ENGINE_DIR]", help="Default: the newest engine under engines/.")
]
Threads = Annotated[int, typer.Option(metavar="N", help="CPU threads; 0 chooses.")]
DeviceRounds = Annotated[
    str,
    typer.Option(
        metavar="auto|on|off", help="Rounds that stay on the GPU: auto where they can, on refuses other requests."
    ),
]
Exact = Annotated[
    bool | None,
    typer.Option(
        "--exact/--no-exact",
        help="CPU engines: every method gives the tokens of ar, bit for bit. Default: int8 only.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
