"""`ddtree-trt check`: verify that an engine is lossless up to rounding, and its drafter as good as the pair's."""

from __future__ import annotations

from dataclasses import replace

import typer

from ddtree_trt.bench.settings import CheckSettings
from ddtree_trt.commands.arguments import AsJson, EngineDirectory, with_options
from ddtree_trt.terminal import printing as terminal


@with_options()
def check(engine_dir: EngineDirectory, settings: CheckSettings, json: AsJson = False) -> None:
    """Check that an engine is lossless, its drafter wired right.

    Every method must give what the target alone would, up to rounding. Ends with exit code 1 when something fails.
    """
    from ddtree_trt.check.findings import describe
    from ddtree_trt.check.run import check_engine

    with terminal.progress_bars() as progress:
        report = check_engine(replace(settings, engine=str(engine_dir)), progress)
    if json:
        terminal.print_json(report.to_dict())
    else:
        print("\n".join(describe(report)))
    if not report.passed:
        raise typer.Exit(1)
