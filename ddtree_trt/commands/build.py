"""`ddtree-trt build`: build an engine directory from checkpoints."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.artifact.progress import Progress
from ddtree_trt.artifact.template_arguments import parse_arguments
from ddtree_trt.build.backends.base import Attention, BuilderOptions
from ddtree_trt.build.backends.tensorrt.gpus import runs_here
from ddtree_trt.build.compile import Backend, BuildRequest, Precision, compile_engine
from ddtree_trt.build.dryrun import dry_run
from ddtree_trt.build.presets import PRESETS
from ddtree_trt.errors import UsageError
from ddtree_trt.terminal import printing as terminal


def _preset_help(field: str) -> str:
    """The default of a limit, and the presets with other values."""
    default = getattr(Limits, field)
    own = {p.name: getattr(p.limits, field) for p in PRESETS.values() if getattr(p.limits, field) != default}
    return f"Default {default}" + "".join(f", {name} {value}" for name, value in own.items()) + "."


def measure(directory: Path, progress: Progress) -> None:
    """Open the engine that was built, measure its latencies and store them."""
    from ddtree_trt.runtime.engines.load import open_engine
    from ddtree_trt.runtime.engines.profile import load_or_measure

    engine = open_engine(directory, progress=progress)
    try:
        load_or_measure(directory, engine, progress)
    finally:
        engine.close()


def build(
    target: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"One of {', '.join(PRESETS)}, or a name for your own pair.")
    ] = BuildRequest.target,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|ID",
            help="A target: a directory, a GGUF file, or OWNER/NAME of the Hugging Face hub, with @REVISION if wanted.",
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(metavar="PATH|ID", help="A drafter, likewise."),
    ] = None,
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
    chat_template_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="What the target's chat template is rendered with, as JSON: enable_thinking=false. May be repeated.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The engine directory. Default engines/NAME.")
    ] = BuildRequest.output,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing engine.")] = BuildRequest.force,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="smNN",
            help="TensorRT for RTX: a kind of GPU to compile for, as in sm89. May be repeated. Default this machine's; "
            "where it has none, every kind that has the precision.",
        ),
    ] = None,
    attention: Annotated[
        Attention,
        typer.Option(
            help="TensorRT: our plugin, or its own layers, which need no `make plugins`. auto: the plugin where it is "
            "built."
        ),
    ] = BuilderOptions.attention,
    row_independence: Annotated[
        bool,
        typer.Option(
            "--row-independence/--no-row-independence",
            help="TensorRT: compute a row the same wherever it stands among others, so that a token of a tree gets the "
            "logits it has alone. Without, a plan has a second profile, for prompts, and may have its weights twice.",
        ),
    ] = BuilderOptions.row_independence,
    builder_optimization_level: Annotated[
        int | None, typer.Option(metavar="0-5", help="TensorRT: how long to search for fast kernels.")
    ] = BuilderOptions.optimization_level,
    builder_workspace_mib: Annotated[
        int | None, typer.Option(metavar="N", help="TensorRT: most scratch memory a layer may use.")
    ] = BuilderOptions.workspace_mib,
    builder_inspect: Annotated[
        bool, typer.Option("--builder-inspect", help="TensorRT: write every layer's details beside the engine as JSON.")
    ] = BuilderOptions.inspect,
    profile: Annotated[
        bool, typer.Option(help="Measure this machine's latencies, which automatic budgets need, after building.")
    ] = True,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would take in memory, and build nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
) -> None:
    """Build an engine from a target and its drafter."""
    started = time.monotonic()
    if json and not dry:
        raise UsageError("--json is for --dry-run; leave it out")
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
        chat_template_args=parse_arguments(chat_template_arg or ()),
        builder=BuilderOptions(
            optimization_level=builder_optimization_level,
            workspace_mib=builder_workspace_mib,
            inspect=builder_inspect,
            attention=attention,
            gpus=tuple(gpu or ()),
            row_independence=row_independence,
        ),
    )
    if dry:
        would = dry_run(request)
        if json:
            terminal.print_json(would.to_dict())
        else:
            terminal.print_dry_run(would)
        would.check()
        return
    if profile and backend != "auto":
        from ddtree_trt.runtime.engines.load import require

        why = "an engine is measured when it is built, unless --no-profile builds it for another machine,"
        require(BACKENDS[backend], why)
    with terminal.progress_bars() as progress:
        manifest = compile_engine(request, progress, terminal.print_note)
        if profile and not runs_here(manifest):
            terminal.print_note("latencies are measured when the engine is first opened on a GPU that it is for")
        elif profile:
            measure(request.destination, progress)
    terminal.print_built(request.destination, manifest, time.monotonic() - started)
