"""A pair of checkpoints, its engine, and one that a fault must leave as it was."""

import shutil
from pathlib import Path

import pytest
from build_faults import OldEngine
from checkpoints import make_pair

from ddtree_trt.build.compile import BuildRequest, compile_engine


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine beside its pair, for all tests; leave it as it is."""
    folder = tmp_path_factory.mktemp("built")
    target, drafter = make_pair(folder / "pair")
    compile_engine(BuildRequest(target="mine", checkpoint=target, drafter=drafter, output=folder / "engine"))
    return folder / "engine"


@pytest.fixture
def pair(tmp_path: Path, built: Path) -> tuple[Path, Path]:
    path = shutil.copytree(built.with_name("pair"), tmp_path / "pair")
    return path / "target", path / "drafter"


@pytest.fixture
def old(tmp_path: Path, built: Path) -> OldEngine:
    return OldEngine(shutil.copytree(built, tmp_path / "engines" / "mine"))
