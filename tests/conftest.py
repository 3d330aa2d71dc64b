"""Fixtures every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.commands.profile import measure_engine


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged pair as an engine directory, profiled; shared by the whole run, so leave it as it is."""
    directory = tmp_path_factory.mktemp("engines") / "tiny"
    compile_engine(BuildRequest(target="tiny", output=directory))
    measure_engine(directory, lambda stage, done, total: None)
    return directory
