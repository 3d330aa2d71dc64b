"""The command line. A command parses, calls one typed function, and prints; errors become one line and an exit code.

Exit codes: 0 done, 1 the work failed, 2 the call was wrong, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ddtree_trt import __version__, terminal
from ddtree_trt.artifact import Limits
from ddtree_trt.build.compile import Backend, BuildRequest, Precision, compile_engine
from ddtree_trt.build.presets import PRESETS
from ddtree_trt.doctor import diagnose
from ddtree_trt.errors import DDTreeError
from ddtree_trt.inspection import inspect_engine

_INTERRUPTED = 130


class Commands(TyperGroup):
    """The command group; turns every exception into one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DDTreeError as error:
            _fail(str(error), error.exit_code, ctx.params.get("debug", False))
        except Exception as error:
            # Typer's own exceptions, for which `main` or Typer is responsible, and a reader that closed our pipe.
            if hasattr(error, "exit_code") or isinstance(error, (typer.Abort, BrokenPipeError)):
                raise
            message = f"unexpected {type(error).__name__}: {error} (ddtree-trt --debug shows where; please report it)"
            _fail(message, 1, ctx.params.get("debug", False))

    def main(self, *args: Any, **options: Any) -> Any:
        code: Any = 1
        try:
            code = super().main(*args, **{**options, "standalone_mode": False})
        except (KeyboardInterrupt, typer.Abort):
            code = _INTERRUPTED
        except Exception as error:
            # Click's usage errors. Their class is click's or Typer's own copy of it, depending on Typer's version.
            if not hasattr(error, "format_message"):
                raise
            context = getattr(error, "ctx", None)
            help_hint = f" (see: {context.command_path} --help)" if context else ""
            terminal.print_error(error.format_message() + help_hint)
            code = getattr(error, "exit_code", 2)
        if code == _INTERRUPTED:
            print("interrupted", file=sys.stderr)
        if not options.get("standalone_mode", True):
            return code
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    terminal.print_error(message)
    raise typer.Exit(code)


app = typer.Typer(
    name="ddtree-trt",
    cls=Commands,
    help="Lossless tree-based speculative decoding: build engines, run them, serve them.",
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"ddtree-trt {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


def _preset_help(field: str) -> str:
    """The default of a limit, and the presets that have their own."""
    default = getattr(Limits, field)
    own = {p.name: getattr(p.limits, field) for p in PRESETS.values() if getattr(p.limits, field) != default}
    return f"Default {default}" + "".join(f", {name} {value}" for name, value in own.items()) + "."


@app.command()
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
    terminal.print_built(request.destination, manifest)


@app.command()
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


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show what this machine has and what that enables."""
    diagnosis = diagnose()
    if json:
        terminal.print_json(dataclasses.asdict(diagnosis))
    else:
        terminal.print_diagnosis(diagnosis)


def main() -> None:
    """The console script."""
    app(prog_name="ddtree-trt")


if __name__ == "__main__":
    main()
