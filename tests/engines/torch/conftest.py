"""The packaged pair for PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_builds import PACKAGED, build_torch_engine
from plugin_libraries import torch_operators

from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.torch import attention as torch_attention
from ddtree_trt.runtime.engines.torch.engine import TorchEngine


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torch") / "tiny"
    build_torch_engine(PACKAGED / "target", PACKAGED / "drafter", path, max_batch=3, max_seq_len=640).close()
    return path


@pytest.fixture
def engine(directory: Path) -> Iterator[TorchEngine]:
    engine = open_engine(directory, threads=1)
    assert isinstance(engine, TorchEngine)
    yield engine
    engine.close()


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.ops.ddtree` on the emulated kernels."""
    library = torch_operators()
    monkeypatch.setattr(torch_attention, "find", lambda name: library)
    torch_attention.load_operators()
