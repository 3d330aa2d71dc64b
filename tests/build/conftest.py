"""A pair of checkpoints, the command line, and an engine that a fault must leave as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from build_faults import OldEngine
from checkpoints import make_pair
from command_line import Cli, in_this_process


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return in_this_process(capsys)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return make_pair(tmp_path / "pair")


@pytest.fixture
def old(tmp_path: Path, pair: tuple[Path, Path]) -> OldEngine:
    return OldEngine(tmp_path / "engines" / "mine", pair)
