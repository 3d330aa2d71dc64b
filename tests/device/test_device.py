"""What is found of a machine's software, from files of a made-up one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from fake_cuda import FakeCuda

from ddtree_trt.device import survey
from ddtree_trt.device.cpu import read_cpu, usable_cores
from ddtree_trt.device.gpus import Gpu
from ddtree_trt.device.libraries import cuda_versions, current_gpu, import_tensorrt
from ddtree_trt.device.survey import CUDA_PYTHON, TENSORRT, survey_machine, torch_cuda
from ddtree_trt.errors import MissingDependency

VERSION = "from typing import Optional\n__version__ = '2.13.0'\ndebug = False\ncuda: Optional[str] = {}\nhip = None\n"


@pytest.mark.parametrize(
    ("text", "cuda"),
    [(VERSION.format("'13.0'"), "13.0"), (VERSION.format("None"), None), ("", None), ("cudart = '1.0'\n", None)],
)
def test_the_cuda_of_torch_is_read_without_importing_it(
    text: str, cuda: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "torch" / "version.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert torch_cuda() == cuda


def test_packages_are_imported_where_there_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bindings without their libraries, as pip can leave them, cannot be imported."""
    (tmp_path / "tensorrt.py").write_text("raise ImportError('libnvinfer.so.11: no such file\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(survey, "installed_versions", lambda *names: dict.fromkeys(names[:1], "11.4"))
    monkeypatch.setattr(survey, "find_gpus", lambda: (Gpu("x", "580.1", "1 MiB", "9.0"),))
    found = survey_machine(import_modules=True)
    assert found.version(TENSORRT) == found.version(CUDA_PYTHON) == "11.4"
    assert found.faults[TENSORRT].startswith("tensorrt cannot be imported (libnvinfer.so.11: no such file); run ")
    assert survey_machine(import_modules=False).faults == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = survey_machine(import_modules=True)
    assert (hidden.gpus, hidden.faults) == ((), {})


def test_the_current_gpu_and_versions_as_they_are_written() -> None:
    cuda = FakeCuda(sm=90)
    cuda.name, cuda.runtime, cuda.driver = "H100\0\0", 13010, 12080
    gpu, versions = current_gpu(cuda), cuda_versions(cuda)
    assert gpu is not None
    assert gpu == ("H100", 90)
    assert versions == ("13.1", "12.8")
    cuda.count = 0
    assert current_gpu(cuda) is None


def test_packages_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingDependency, match=r"^the tensorrt backend cannot import tensorrt \(.*pip install"):
        import_tensorrt()
    with pytest.raises(MissingDependency, match=r"^it was built with another \(.*pip install"):
        import_tensorrt("it was built with another")


def test_cores_are_those_of_this_process_where_the_system_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7} if process == 0 else set(), raising=False)
    assert usable_cores() == read_cpu().cores == 3
