"""`ddtree-trt build`: build an engine directory from checkpoints."""

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.progress import Progress
from ddtree_trt.artifact.template_arguments import parse_arguments
from ddtree_trt.build.backends.tensorrt.backend import runs_here
from ddtree_trt.build.compile import BuildRequest, compile_engine, dry_run
from ddtree_trt.commands.arguments import with_options
from ddtree_trt.errors import UsageError
from ddtree_trt.terminal import printing as terminal


def measure(directory: Path, progress: Progress) -> None:
    """Open the engine that was built, measure its latencies and store them."""
    from ddtree_trt.runtime.engines.load import open_engine
    from ddtree_trt.runtime.engines.profile import load_or_measure

    with closing(open_engine(directory, progress=progress)) as engine:
        load_or_measure(directory, engine, progress)


@with_options()
def build(
    request: BuildRequest,
    chat_template_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="What the target's chat template is rendered with, as JSON: enable_thinking=false. May be repeated.",
        ),
    ] = None,
    profile: Annotated[
        bool, typer.Option(help="Measure this machine's latencies, which automatic budgets need, after building.")
    ] = True,
    dry: Annotated[bool, typer.Option("--dry-run", help="Say what memory it would take; build nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
) -> None:
    """Build an engine from a target and its drafter."""
    started = time.monotonic()
    if json and not dry:
        raise UsageError("--json is for --dry-run; leave it out")
    request = replace(request, chat_template_args=parse_arguments(chat_template_arg or ()))
    if dry:
        would = dry_run(request)
        if json:
            terminal.print_json(would.to_dict())
        else:
            terminal.print_dry_run(would)
        would.check()
        return
    if profile and request.backend != "auto":
        from ddtree_trt.runtime.engines.load import require

        why = "an engine is measured when it is built, unless --no-profile builds it for another machine,"
        require(BACKENDS[request.backend], why)
    with terminal.progress_bars() as progress:
        manifest = compile_engine(request, progress, terminal.print_note)
        if profile and not runs_here(manifest):
            terminal.print_note("latencies are measured when the engine is first opened on a GPU that it is for")
        elif profile:
            measure(request.destination, progress)
    terminal.print_built(request.destination, manifest, time.monotonic() - started)
