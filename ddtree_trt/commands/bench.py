"""`ddtree-trt bench`: methods, budgets and prompts on one engine."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ddtree_trt.artifact.files import newest_engine
from ddtree_trt.bench.settings import BenchSettings
from ddtree_trt.commands.options.common import NewestByDefault, listing, words
from ddtree_trt.commands.options.outputs import STDOUT, folders_of, prepare_folders, write_text
from ddtree_trt.commands.options.records import with_options
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.decoding.methods import BASELINES, METHODS
from ddtree_trt.terminal import printing as terminal

_METHODS = (
    f"Of {', '.join(METHODS)}; {' and '.join(m.name for m in BASELINES)} always. Default: what the drafter is for."
)


@with_options()
def bench(
    engine_dir: NewestByDefault = None,
    methods: Annotated[str | None, typer.Option(metavar="LIST", help=_METHODS)] = None,
    budgets: Annotated[
        str, typer.Option(metavar="LIST", help="Draft nodes per round of methods that make trees; auto chooses.")
    ] = listing(BenchSettings.budgets),
    prompts: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="JSON Lines, or tiny; repeatable. Default: the shipped prompts."),
    ] = None,
    *,
    settings: BenchSettings,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result; - is stdout.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the result, as PNG or SVG.")] = None,
) -> None:
    """Measure methods and budgets, interleaved.

    On the same prompts, each from a cold cache, beside `ar` and the chain of the same engine.
    """
    try:
        sizes: list[Any] = [size if size == "auto" else int(size) for size in words(budgets) or ()]
    except ValueError:
        raise UsageError(f"--budgets must be numbers and auto, separated by commas, not {budgets!r}") from None
    settings = replace(
        settings,
        engine=str(engine_dir or newest_engine()),
        methods=words(methods) or (),
        budgets=tuple(sizes),
        prompts=tuple(prompts or settings.prompts),
    )
    prepare_folders(folders_of((json, plot)))

    from ddtree_trt.bench import report
    from ddtree_trt.bench.measure import engine_runs, measure
    from ddtree_trt.bench.session import Session

    if plot is not None:
        report.require_matplotlib()
    with terminal.progress_bars() as progress, closing(Session(Path(settings.engine), settings)) as session:
        result = measure(session, settings, engine_runs(session, settings), progress)
    if json is not None:
        write_text(json, result.to_json())
    if plot is not None:
        report.draw(result, plot)
    if json != STDOUT:
        print(report.text(result), end="")
