"""Builds for TensorRT on a machine that is told: real bindings, a recording fake of the builder, a fake of the GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_tensorrt import FakeTensorRt
from real_tensorrt import ROOT

from ddtree_trt.artifact.manifest import Manifest, load_manifest
from ddtree_trt.artifact.verify import verify_files
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.errors import DDTreeError
from ddtree_trt.plugins import library

ENGINE_MODULE = "ddtree_trt.build.backends.tensorrt.plan"
SOURCE = ROOT / "ddtree_trt" / "build" / "backends" / "tensorrt" / "plan.py"
SUCCESS, NO_DRIVER = SimpleNamespace(name="cudaSuccess"), SimpleNamespace(name="cudaErrorInsufficientDriver")
DIMS: dict[str, Any] = {"head_dim": 64, "num_heads": 2, "num_kv_heads": 1, "max_positions": 512}


class Machine:
    """What the build finds on this machine; change it before building."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.tensorrt = FakeTensorRt()
        self.plugins = folder / library.PLUGINS
        self.plugins.write_bytes(b"\x7fELF ddtree-plugin-abi=2; and code")
        self.cuda = ModuleType("cuda.bindings.runtime")
        device = SimpleNamespace(name=b"NVIDIA H100 80GB HBM3\0\0", major=9, minor=0)
        self.device = device
        for name, value in {
            "cudaError_t": SimpleNamespace(cudaSuccess=SUCCESS),
            "cudaGetErrorString": lambda status: (SUCCESS, b"words for it"),
            "cudaGetDeviceCount": lambda: (SUCCESS, 1),
            "cudaGetDevice": lambda: (SUCCESS, 0),
            "cudaGetDeviceProperties": lambda index: (SUCCESS, device),
            "cudaRuntimeGetVersion": lambda: (SUCCESS, 13000),
            "cudaDriverGetVersion": lambda: (SUCCESS, 13010),
        }.items():
            setattr(self.cuda, name, value)
        patch.setattr(library.find, "__defaults__", (folder,))
        patch.setitem(sys.modules, "tensorrt", self.tensorrt.module)
        for name in ("cuda", "cuda.bindings", "cuda.bindings.runtime"):
            patch.setitem(sys.modules, name, self.cuda)
        patch.delitem(sys.modules, ENGINE_MODULE, raising=False)


def build(output: Path, progress: Callable[[str, int, int], None] = lambda *_: None, **options: Any) -> Manifest:
    request = BuildRequest(**{"target": "tiny", "backend": "tensorrt", "output": output, **options})
    manifest = compile_engine(request, progress)
    assert load_manifest(output) == manifest
    verify_files(output, manifest)
    return manifest


def refused(machine: Machine, tmp_path: Path, error: type[DDTreeError], *words: str, **options: Any) -> None:
    """The build is refused with these words, an engine that was there is untouched, and nothing else is left."""
    engine = tmp_path / "engines" / "e"
    engine.mkdir(parents=True)
    (engine / "manifest.json").write_text("old")
    with pytest.raises(error) as caught:
        build(engine, force=True, **options)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [p.name for p in engine.iterdir()] == ["manifest.json"]
    assert [p.name for p in engine.parent.iterdir() if p.suffix != ".timing"] == ["e"]
