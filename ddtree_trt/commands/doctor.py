"""`ddtree-trt doctor`: report what this machine has and what that enables."""

from __future__ import annotations

import dataclasses

from ddtree_trt.commands.arguments import AsJson
from ddtree_trt.doctor import diagnose
from ddtree_trt.terminal import printing as terminal


def doctor(json: AsJson = False) -> None:
    """Show what this machine has and what that enables."""
    diagnosis = diagnose()
    if json:
        terminal.print_json(dataclasses.asdict(diagnosis))
    else:
        terminal.print_diagnosis(diagnosis)
