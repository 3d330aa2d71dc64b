"""`ddtree-trt ablate`: what trees, depths, candidates and budgets are worth on an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ddtree_trt.bench.ablation.settings import AblationSettings
from ddtree_trt.commands.options.common import EngineDirectory, listing, numbers
from ddtree_trt.commands.options.outputs import STDOUT, folders_of, prepare_folders, write_text
from ddtree_trt.commands.options.records import with_options
from ddtree_trt.runtime.options import EngineOptions
from ddtree_trt.terminal import printing as terminal

_DEFAULT = AblationSettings


@with_options(options=("threads", "exact"))
def ablate(
    engine_dir: EngineDirectory,
    prompts: Annotated[
        list[str] | None,
        typer.Option(metavar="SET", help="As in ddtree-trt bench; repeatable. Default: the shipped prompts."),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="Prompts per set.")] = _DEFAULT.limit,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="New tokens of a text.")] = _DEFAULT.max_tokens,
    budgets: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Draft nodes of a tree, also more than the engine was built for where it has no plans. "
            f"Default {listing(_DEFAULT.budgets)}.",
        ),
    ] = None,
    depths: Annotated[
        str | None, typer.Option(metavar="LIST", help=f"Most tokens of a path. Default {listing(_DEFAULT.depths)}.")
    ] = None,
    temperatures: Annotated[
        str | None, typer.Option(metavar="LIST", help=f"Default {listing(_DEFAULT.temperatures)}.")
    ] = None,
    timed_prompts: Annotated[
        int, typer.Option(metavar="N", help="Prompts that are decoded for times; 0 measures none.")
    ] = _DEFAULT.timed_prompts,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the draws at a temperature.")] = _DEFAULT.seed,
    *,
    options: EngineOptions,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result; - is stdout.")] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write tables in Markdown; - is stdout.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw a picture, a PNG file.")] = None,
) -> None:
    """Compare ways to make trees, node for node.

    At equal nodes, depths, candidates, budgets and temperatures. Trees are compared by replay of known texts, so that
    the comparison has no noise; only times are measured.
    """
    lists: dict[str, Any] = {
        "budgets": numbers("--budgets", budgets, int),
        "depths": numbers("--depths", depths, int),
        "temperatures": numbers("--temperatures", temperatures, float),
        "prompts": tuple(prompts) if prompts else None,
    }
    settings = AblationSettings(
        engine=str(engine_dir),
        limit=limit,
        max_tokens=max_tokens,
        timed_prompts=timed_prompts,
        seed=seed,
        **vars(options),
        **{name: value for name, value in lists.items() if value is not None},
    )
    if plot is not None:
        from ddtree_trt.bench.reporting.plots import require_matplotlib

        require_matplotlib()
    prepare_folders(folders_of((json, markdown, plot)))
    from ddtree_trt.bench.ablation import result as report
    from ddtree_trt.bench.ablation.run import run_ablation

    with terminal.progress_bars() as progress:
        found = run_ablation(settings, progress)
    if json is not None:
        write_text(json, found.to_json())
    if markdown is not None:
        write_text(markdown, report.markdown(found))
    if plot is not None:
        from ddtree_trt.bench.ablation.picture import draw

        draw(found, plot)
    if STDOUT not in (json, markdown):
        from ddtree_trt.bench.reporting.terminal import print_tables

        print_tables(report.tables(found), report.lines(found))
