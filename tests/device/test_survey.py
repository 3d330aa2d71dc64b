"""What is found of a machine's software, from files of a made-up one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddtree_trt.device import survey
from ddtree_trt.device.gpus import Gpu
from ddtree_trt.device.survey import CUDA_PYTHON, TENSORRT, survey_machine, torch_cuda

VERSION = "from typing import Optional\n__version__ = '2.13.0'\ndebug = False\ncuda: Optional[str] = {}\nhip = None\n"


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        (VERSION.format("'13.0'"), "13.0"),
        (VERSION.format("None"), None),
        ("cuda = '12.8'\n", "12.8"),
        ("", None),
        ("cudart = '1.0'\n", None),
    ],
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


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert torch_cuda() is None


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
