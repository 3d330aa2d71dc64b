"""The command line. A command parses, calls one typed function, and prints; errors become one line and an exit code.

Exit codes: 0 done, 1 the work failed, 2 the call was wrong, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ddtree_trt import __version__
from ddtree_trt.commands.bench import bench
from ddtree_trt.commands.build import build
from ddtree_trt.commands.check import check
from ddtree_trt.commands.export import export_triton, export_trtllm
from ddtree_trt.commands.inspect import doctor, inspect
from ddtree_trt.commands.run import RunCommand, run
from ddtree_trt.commands.serve import run_batch, serve
from ddtree_trt.errors import DDTreeError
from ddtree_trt.terminal import printing as terminal

INTERRUPTED = 130  # as shells report a command that SIGINT ended


class Commands(TyperGroup):
    """The command group; it reports every exception in one line on stderr and by an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # while an error of it can be reported
            return result
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            # Typer's own exceptions, for which `main` or Typer is responsible, and a reader that closed our pipe.
            if hasattr(error, "exit_code") and not isinstance(error, DDTreeError):
                raise
            if isinstance(error, (typer.Abort, BrokenPipeError)):
                raise
            if isinstance(error, OSError) and error.errno in _NO_PLACE:
                raise  # `main` reports it, wherever it happened
            _report(error, ctx.params.get("debug", False))

    def main(self, *args: Any, **options: Any) -> Any:
        code: Any = 1
        try:
            code = super().main(*args, **{**options, "standalone_mode": False})
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except OSError as error:
            if error.errno not in _NO_PLACE:
                raise
            _report_no_place(error)
            code = 1
        except Exception as error:
            # Click's usage errors. Their class is click's or Typer's own copy of it, depending on Typer's version.
            if not hasattr(error, "format_message"):
                raise
            context = getattr(error, "ctx", None)
            help_hint = f" (see: {context.command_path} --help)" if context else ""
            terminal.print_error(error.format_message() + help_hint)
            code = getattr(error, "exit_code", 2)
        if not options.get("standalone_mode", True):
            return code
        sys.exit(code if isinstance(code, int) else 0)


_NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def _report_no_place(error: OSError) -> None:
    """One line on stderr. What stdout does not take is dropped: Python would try again at exit."""
    place = f" {error.filename}" if error.filename else ""
    terminal.print_error(f"cannot write{place}: {error.strerror}; free some space, or write to another place")
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: Exception, debug: bool) -> None:
    """One line on stderr, and the error's exit code."""
    if debug:
        traceback.print_exc()
    if isinstance(error, DDTreeError):
        terminal.print_error(str(error))
        raise typer.Exit(error.exit_code)
    terminal.print_error(
        f"unexpected {type(error).__name__}: {error} (ddtree-trt --debug shows where; please report it)"
    )
    raise typer.Exit(1)


app = typer.Typer(
    name="ddtree-trt",
    cls=Commands,
    help="Lossless tree-based speculative decoding: build engines, run them, serve them.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Rich's tables cut long words off in 80 columns
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


for command in (build, run, serve, run_batch, check, bench, export_triton, export_trtllm, inspect, doctor):
    app.command(cls=RunCommand if command is run else None)(command)


def main() -> None:
    """Run a command; does not return. The console script calls it through `ddtree_trt.__main__`."""
    app(prog_name="ddtree-trt")


if __name__ == "__main__":
    main()
