"""`ddtree-trt inspect` and `doctor`: what an engine holds, and what this machine has."""

import dataclasses

from ddtree_trt.commands.arguments import AsJson, EngineDirectory
from ddtree_trt.doctor import diagnose, inspect_engine
from ddtree_trt.terminal import printing as terminal


def inspect(engine_dir: EngineDirectory, json: AsJson = False) -> None:
    """Verify an engine and show what it holds."""
    with terminal.progress_bars() as progress:
        report = inspect_engine(engine_dir, progress)
    if json:
        terminal.print_json(report.to_dict())
    else:
        terminal.print_engine(report)


def doctor(json: AsJson = False) -> None:
    """Show what this machine has and what that enables."""
    diagnosis = diagnose()
    if json:
        terminal.print_json(dataclasses.asdict(diagnosis))
    else:
        terminal.print_diagnosis(diagnosis)
