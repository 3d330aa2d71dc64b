"""The packaged pair for PyTorch."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_builds import PACKAGED, build_torch_engine
from plugin_libraries import torch_operators
from sharing import build_once

from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.torch import attention as torch_attention
from ddtree_trt.runtime.engines.torch.attention import Attention
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.graphs import Graphs


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def build(path: Path) -> None:
        build_torch_engine(PACKAGED / "target", PACKAGED / "drafter", path, max_batch=3, max_seq_len=400).close()

    return build_once(tmp_path_factory, "torch", build)


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


@pytest.fixture
def open_on_kernels(operators: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], TorchEngine]:
    """Opens an engine as it runs on a GPU, but for the graphs: its operators are the kernels' own source on the CPU."""

    def open_directory(directory: Path) -> TorchEngine:
        with monkeypatch.context() as patch:
            patch.setattr(f"{TorchEngine.__module__}.attention_for", lambda *given: Attention(given[-1]()))
            engine = open_engine(directory)
        assert isinstance(engine, TorchEngine) and engine.target.kernels
        return engine

    return open_directory


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """Runs passes as CUDA graphs do: for equal keys always the first call's work, on the first call's tensors. Counts
    those of each."""
    works: dict[Any, Any] = {}
    runs: Counter[Any] = Counter()

    def run(self: Graphs, key: Any, work: Any) -> None:
        works.setdefault(key, work)()
        runs[key] += 1

    monkeypatch.setattr(Graphs, "run", run)
    return runs
