"""A pair of checkpoints, and an engine that a fault must leave as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from build_faults import OldEngine
from checkpoints import make_pair


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return make_pair(tmp_path / "pair")


@pytest.fixture
def old(tmp_path: Path, pair: tuple[Path, Path]) -> OldEngine:
    return OldEngine(tmp_path / "engines" / "mine", pair)
