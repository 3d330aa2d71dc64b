"""What the measurements' command lines have in common. Typer makes each of the signature of a module's `main`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from ddtree_trt.bench.settings import TINY

Prompts = Annotated[list[str], typer.Option(help="as in ddtree-trt bench; repeatable")]
PROMPTS = [TINY]
Json = Annotated[Path | None, typer.Option("--json", help="write every figure there")]
Plot = Annotated[Path | None, typer.Option("--plot", help="draw a picture there")]
Output = Annotated[Path, typer.Option("--output", "-o")]


def integers(text: str) -> tuple[int, ...]:
    """Those between commas."""
    return tuple(int(word) for word in text.split(",") if word)


def numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(",") if word)


def print_row(cells: Iterable[object], *, head: bool = False) -> None:
    """A line of a table in Markdown, shown at once; behind the first one its rule."""
    line = "| " + " | ".join(map(str, cells)) + " |"
    print(line + ("\n" + "|---" * line.count(" | ") + "|---|" if head else ""), flush=True)
