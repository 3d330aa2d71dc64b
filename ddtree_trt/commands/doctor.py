"""`ddtree-trt doctor`: what this machine has and what that enables."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from ddtree_trt.doctor import diagnose
from ddtree_trt.terminal import printing as terminal


def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show what this machine has and what that enables."""
    diagnosis = diagnose()
    if json:
        terminal.print_json(dataclasses.asdict(diagnosis))
    else:
        terminal.print_diagnosis(diagnosis)
