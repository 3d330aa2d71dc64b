"""The command line. A command parses, calls one typed function, and prints; errors become one line and an exit code.

Exit codes: 0 done, 1 the work failed, 2 the call was wrong, 130 interrupted.
"""

from __future__ import annotations

import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ddtree_trt import __version__, terminal
from ddtree_trt.commands import bench
from ddtree_trt.commands.build import build
from ddtree_trt.commands.check import check
from ddtree_trt.commands.doctor import doctor
from ddtree_trt.commands.export_triton import export_triton
from ddtree_trt.commands.inspect import inspect
from ddtree_trt.commands.profile import profile
from ddtree_trt.commands.run import run
from ddtree_trt.commands.serve import serve
from ddtree_trt.errors import DDTreeError

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


for command in (build, run, serve, check, export_triton, inspect, profile, doctor):
    app.command()(command)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """The console script."""
    app(prog_name="ddtree-trt")


if __name__ == "__main__":
    main()
