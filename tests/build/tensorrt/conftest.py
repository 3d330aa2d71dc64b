"""Pretended machines that build for TensorRT; see `tensorrt_builds`."""

from pathlib import Path

import pytest
from tensorrt_builds import Machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Without our plugin library: engines get native attention, from the real builder."""
    return Machine(tmp_path / "native", monkeypatch)


@pytest.fixture
def with_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "native", monkeypatch, plugins=True)
