"""A result on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddtree_trt.bench.replay import differences, ratios
from ddtree_trt.bench.reporting import markdown as report
from ddtree_trt.bench.result import BenchResult

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 160  # of a line where stdout is no terminal


def print_result(result: BenchResult) -> None:
    """Print every table, the legend and the notes."""
    console = _console()
    for heading, rows in report.groups(result):
        _print_table(console, f"{heading} ({max(r.prompts for r in rows)} prompts)", report.overview(rows))
        _print_lines(console, report.why_auto(rows))
        _print_table(console, "milliseconds per round by stage", report.stages(rows))
        _print_table(console, "round time", report.round_times(rows))
    _print_lines(console, [report.LEGEND, *report.notes(result)])


def print_replay(old: BenchResult, new: BenchResult) -> None:
    """Print new over old figures, and the differences of engine, machine and software."""
    console = _console()
    _print_table(console, "now over then", ratios(old, new))
    changes = differences(old, new)
    _print_lines(console, changes or ["the engine, the machine and every package are the same"])


def print_tables(tables: Sequence[tuple[str, report.Table]], lines: Sequence[str]) -> None:
    """Print tables under their headings, then lines of text."""
    console = _console()
    for heading, table in tables:
        _print_table(console, heading, table)
    _print_lines(console, lines)


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def _print_table(console: Console, heading: str, table: report.Table) -> None:
    from rich.table import Table

    header, rows = table
    if not rows:
        return
    console.print(heading, style="bold", markup=False)  # a title of the table would be as narrow as the table
    view = Table(box=None, pad_edge=False)
    for i, name in enumerate(header):
        numeric = i > 0 and not rows[0][i].isalpha()
        view.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        view.add_row(*row)
    console.print(view)
    console.print()


def _print_lines(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, style="dim", markup=False)
