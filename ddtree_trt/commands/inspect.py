"""`ddtree-trt inspect`: verify an engine directory and show its contents."""

from __future__ import annotations

from ddtree_trt.commands.arguments import AsJson, EngineDirectory
from ddtree_trt.inspection import inspect_engine
from ddtree_trt.terminal import printing as terminal


def inspect(
    engine_dir: EngineDirectory,
    json: AsJson = False,
) -> None:
    """Verify an engine and show what it holds."""
    with terminal.progress_bars() as progress:
        report = inspect_engine(engine_dir, progress)
    if json:
        terminal.print_json(report.to_dict())
    else:
        terminal.print_engine(report)
