"""A pair of checkpoints, the command line, and an engine that a fault must leave as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from build_faults import Cli, OldEngine
from checkpoints import make_pair

from ddtree_trt.cli import app


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def run(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            app([str(a) for a in args], prog_name="ddtree-trt")
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return make_pair(tmp_path / "pair")


@pytest.fixture
def old(tmp_path: Path, pair: tuple[Path, Path]) -> OldEngine:
    return OldEngine(tmp_path / "engines" / "mine", pair)
