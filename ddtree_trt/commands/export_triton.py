"""`ddtree-trt export-triton`: export an engine as a model of Triton Inference Server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_trt.commands.options.common import EngineDirectory
from ddtree_trt.errors import UsageError
from ddtree_trt.terminal import printing as terminal
from ddtree_trt.triton import export as triton
from ddtree_trt.triton.export import ExportRequest
from ddtree_trt.triton.inputs import LayoutName


def export_triton(
    engine_dir: EngineDirectory,
    repository: Annotated[Path, typer.Argument(metavar="REPO_DIR", help="A model repository; made if missing.")],
    model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name. Default: the engine's.")
    ] = ExportRequest.model_name,
    layout: Annotated[
        LayoutName, typer.Option(help="Whose tensor names and shapes: TensorRT-LLM's BLS model or the vLLM backend's.")
    ] = ExportRequest.layout,
    instances: Annotated[
        int, typer.Option(metavar="N", help="Processes with an engine each; with --gpus, on each GPU.")
    ] = ExportRequest.instances,
    gpus: Annotated[
        str, typer.Option(metavar="LIST", help="GPUs such as 0,1. Default: GPU 0 for an engine that needs one.")
    ] = "",
    max_queue: Annotated[
        int, typer.Option(metavar="N", help="Sequences that may wait in one instance.")
    ] = ExportRequest.max_queue,
    link: Annotated[
        bool, typer.Option("--link/--copy", help="Link the engine by a relative path, or copy it.")
    ] = ExportRequest.link,
) -> None:
    """Export an engine as a Triton model."""
    request = ExportRequest(
        engine_dir=engine_dir,
        repository=repository,
        model_name=model_name,
        layout=layout,
        instances=instances,
        gpus=_numbers(gpus),
        max_queue=max_queue,
        link=link,
    )
    with terminal.progress_bars() as progress:
        model = triton.export_triton(request, progress)
    print(f"exported {model}: {layout} layout, {'linked' if link else 'copied'} engine")
    print(f"next: see {model / 'README.md'}")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UsageError(f"--gpus must be numbers separated by commas, such as 0,1, not {text!r}") from None
