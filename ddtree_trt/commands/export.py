"""`ddtree-trt export-triton` and `export-trtllm`: an engine for Triton, its pair for TensorRT-LLM."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ddtree_trt.commands.arguments import EngineDirectory, with_options
from ddtree_trt.errors import UsageError
from ddtree_trt.terminal import printing as terminal
from ddtree_trt.triton import export as triton


@with_options()
def export_triton(
    engine_dir: EngineDirectory,
    repository: Annotated[Path, typer.Argument(metavar="REPO_DIR", help="A model repository; made if missing.")],
    model_name: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name, else the engine's.")] = None,
    gpus: Annotated[str, typer.Option(metavar="LIST", help="GPUs such as 0,1. Default: 0 if one is needed.")] = "",
    *,
    options: triton.ExportOptions,
) -> None:
    """Export an engine as a Triton model."""
    try:
        numbers = tuple(map(int, gpus.split(","))) if gpus else ()
    except ValueError:
        raise UsageError(f"--gpus must be numbers separated by commas, such as 0,1, not {gpus!r}") from None
    options = replace(options, gpus=numbers)
    with terminal.progress_bars() as progress:
        model = triton.export_triton(engine_dir, repository, model_name, options, progress=progress)
    print(f"exported {model}: {options.layout} layout, {'linked' if options.link else 'copied'} engine")
    print(f"next: see {model / 'README.md'}")


def export_trtllm(
    engine_dir: EngineDirectory,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="DIR|ID", help="The target's checkpoint, if the engine was built from a local one."),
    ] = None,
    drafter: Annotated[str | None, typer.Option(metavar="DIR|ID", help="The drafter's, likewise.")] = None,
) -> None:
    """Print an engine's pair for TensorRT-LLM's own DFlash."""
    from ddtree_trt.trtllm_export import export_pair

    print(export_pair(engine_dir, checkpoint=checkpoint, drafter=drafter), end="")
