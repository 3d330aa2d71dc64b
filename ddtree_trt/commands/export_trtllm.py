"""`ddtree-trt export-trtllm`: what TensorRT-LLM needs to run the same pair."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_trt.commands.arguments import EngineDirectory


def export_trtllm(
    engine_dir: EngineDirectory,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it; made if missing.")],
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="DIR|ID", help="The target's checkpoint, if the engine was built from a local one."),
    ] = None,
    drafter: Annotated[str | None, typer.Option(metavar="DIR|ID", help="The drafter's, likewise.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
) -> None:
    """Export an engine's pair for TensorRT-LLM's own DFlash."""
    from ddtree_trt.trtllm_export import CONFIG, RELEASE, export_pair

    export_pair(engine_dir, directory, checkpoint=checkpoint, drafter=drafter, force=force)
    print(f"exported {directory}: DFlash for TensorRT-LLM {RELEASE}")
    print(f"next: see {directory / CONFIG}")
