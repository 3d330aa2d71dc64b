"""`ddtree-trt check`: verify that an engine is lossless up to rounding, and its drafter as good as the pair's."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_trt.bench.settings import CheckSettings
from ddtree_trt.commands.options.common import AsJson, EngineDirectory
from ddtree_trt.commands.options.records import with_options
from ddtree_trt.runtime.options import EngineOptions
from ddtree_trt.terminal import printing as terminal


@with_options()
def check(
    engine_dir: EngineDirectory,
    prompts: Annotated[
        list[str] | None,
        typer.Option(metavar="SET", help="As in ddtree-trt bench; repeatable. Default: the shipped prompts."),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="Prompts per set.")] = CheckSettings.limit,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", help="New tokens of a greedy request.")
    ] = CheckSettings.max_tokens,
    seeds: Annotated[
        int, typer.Option(metavar="N", help="Sampled requests per prompt, method and temperature; 0 skips them.")
    ] = CheckSettings.seeds,
    *,
    options: EngineOptions,
    json: AsJson = False,
) -> None:
    """Check that an engine is lossless, its drafter wired right.

    Every method must give what the target alone would, up to rounding. Ends with exit code 1 when something fails.
    """
    settings = CheckSettings(
        engine=str(engine_dir),
        prompts=tuple(prompts) if prompts else CheckSettings.prompts,
        limit=limit,
        max_tokens=max_tokens,
        seeds=seeds,
        **vars(options),
    )
    from ddtree_trt.check.findings import describe
    from ddtree_trt.check.run import check_engine

    with terminal.progress_bars() as progress:
        report = check_engine(settings, progress)
    if json:
        terminal.print_json(report.to_dict())
    else:
        print("\n".join(describe(report)))
    if not report.passed:
        raise typer.Exit(1)
