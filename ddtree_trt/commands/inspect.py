"""`ddtree-trt inspect`: what an engine directory holds, verified."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_trt.inspection import inspect_engine
from ddtree_trt.terminal import printing as terminal


def inspect(
    engine_dir: Annotated[Path, typer.Argument(metavar="ENGINE_DIR", help="An engine directory.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Verify an engine and show what it holds."""
    with terminal.progress_bars() as progress:
        report = inspect_engine(engine_dir, progress)
    if json:
        terminal.print_json(report.to_dict())
    else:
        terminal.print_engine(report)
