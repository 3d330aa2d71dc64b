"""`ddtree-trt build`: checkpoints to an engine directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_trt import terminal
from ddtree_trt.artifact import Limits
from ddtree_trt.build.compile import Backend, BuildRequest, Precision, compile_engine
from ddtree_trt.build.presets import PRESETS
from ddtree_trt.commands.profile import measure_engine


def _preset_help(field: str) -> str:
    """The default of a limit, and the presets that have their own."""
    default = getattr(Limits, field)
    own = {p.name: getattr(p.limits, field) for p in PRESETS.values() if getattr(p.limits, field) != default}
    return f"Default {default}" + "".join(f", {name} {value}" for name, value in own.items()) + "."


def build(
    target: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"One of {', '.join(PRESETS)}, or a name for your own pair.")
    ] = BuildRequest.target,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A local target, instead of the named one's download.")
    ] = BuildRequest.checkpoint,
    drafter: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A local drafter, instead of the named one's download.")
    ] = BuildRequest.drafter,
    backend: Annotated[Backend, typer.Option(help="What runs the engine.")] = BuildRequest.backend,
    precision: Annotated[Precision, typer.Option(help="What it computes in.")] = BuildRequest.precision,
    max_seq_len: Annotated[
        int | None, typer.Option(metavar="N", help=f"Prompt and output tokens. {_preset_help('max_seq_len')}")
    ] = BuildRequest.max_seq_len,
    max_tree_budget: Annotated[
        int | None, typer.Option(metavar="N", help=f"Largest tree. {_preset_help('max_tree_budget')}")
    ] = BuildRequest.max_tree_budget,
    max_batch: Annotated[
        int | None, typer.Option(metavar="N", help=f"Sequences at a time. {_preset_help('max_batch')}")
    ] = BuildRequest.max_batch,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The engine directory. Default engines/NAME.")
    ] = BuildRequest.output,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing engine.")] = BuildRequest.force,
    profile: Annotated[
        bool, typer.Option(help="Measure this machine's latencies, which automatic budgets need, after building.")
    ] = True,
) -> None:
    """Build an engine from a target and its drafter."""
    request = BuildRequest(
        target=target,
        checkpoint=checkpoint,
        drafter=drafter,
        backend=backend,
        precision=precision,
        max_seq_len=max_seq_len,
        max_tree_budget=max_tree_budget,
        max_batch=max_batch,
        output=output,
        force=force,
    )
    with terminal.progress_bars() as progress:
        manifest = compile_engine(request, progress)
        if profile and manifest.drafter_kind == "dflash":
            measure_engine(request.destination, progress)
    terminal.print_built(request.destination, manifest)
