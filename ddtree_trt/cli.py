"""The command line. A command parses, calls one typed function, and prints; errors become one line and an exit code.

Exit codes: 0 done, 1 the work failed, 2 the call was wrong, 130 interrupted.
"""

import errno
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ddtree_trt import __version__
from ddtree_trt.commands.bench import bench, check
from ddtree_trt.commands.build import build
from ddtree_trt.commands.export import export_triton, export_trtllm
from ddtree_trt.commands.inspect import doctor, inspect
from ddtree_trt.commands.run import run
from ddtree_trt.commands.serve import run_batch, serve
from ddtree_trt.errors import DDTreeError
from ddtree_trt.terminal import printing as terminal

INTERRUPTED = 130  # as shells report a command that SIGINT ended


class Commands(TyperGroup):
    """The command group; it reports every exception in one line on stderr and by an exit code."""

    debug = False  # whether errors are shown with their traceback

    def invoke(self, ctx: Any) -> Any:
        result = super().invoke(ctx)
        sys.stdout.flush()  # while an error of it can be reported
        return result

    def main(self, *args: Any, **options: Any) -> Any:
        code: Any = 0
        try:
            code = super().main(*args, **{**options, "standalone_mode": False})
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except Exception as error:
            code = self._report(error)
        if not options.get("standalone_mode", True):
            return code
        sys.exit(code if isinstance(code, int) else 0)

    def _report(self, error: Exception) -> int:
        """The error's exit code, after a line on stderr."""
        if self.debug:
            traceback.print_exc()
        text, code = str(error), getattr(error, "exit_code", 1)
        if hasattr(error, "format_message"):  # a usage error of click's, or of Typer's own copy of it
            context = getattr(error, "ctx", None)
            text = error.format_message() + (f" (see: {context.command_path} --help)" if context else "")
        elif isinstance(error, OSError) and error.errno in _NO_PLACE:
            place = f" {error.filename}" if error.filename else ""
            text = f"cannot write{place}: {error.strerror}; free some space, or write to another place"
            try:
                sys.stdout.flush()
            except OSError:  # what stdout does not take is dropped: Python would try again at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        elif not isinstance(error, DDTreeError):
            text = f"unexpected {type(error).__name__}: {error} (ddtree-trt --debug shows where; please report it)"
        terminal.print_error(text)
        return int(code)


_NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
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
    Commands.debug = debug
    if version:
        print(f"ddtree-trt {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


for command in (build, run, serve, run_batch, check, bench, export_triton, export_trtllm, inspect, doctor):
    app.command()(command)


def main() -> None:
    """Run a command; does not return. The console script calls it through `ddtree_trt.__main__`."""
    app(prog_name="ddtree-trt")


if __name__ == "__main__":
    main()
