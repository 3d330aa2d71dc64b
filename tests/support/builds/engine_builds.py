"""Engines built for one test: of any pair, for any version of the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ddtree_trt
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.toolchain import installed_versions
from ddtree_trt.artifact.verify import verify_files
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.engines.torch.engine import TorchEngine

PACKAGED = Path(ddtree_trt.__file__).parent / "assets" / "tiny"
INSTALLED = installed_versions("onnxruntime")["onnxruntime"]
CAUSAL = "1.23.2"  # an onnxruntime whose attention kernel is always causal; engines built for it run on all


def build_engine(
    target: Path, drafter: Path, engine: Path, *, onnxruntime: str = INSTALLED, **options: Any
) -> OrtEngine:
    """Build an engine in the directory `engine`, for that version of onnxruntime, and load it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "ddtree_trt.build.backends.onnxruntime.backend.installed_versions", lambda *_: {"onnxruntime": onnxruntime}
        )
        compile_engine(BuildRequest(target="pair", checkpoint=target, drafter=drafter, output=engine, **options))
    manifest = load_manifest(engine)
    assert manifest.toolchain["onnxruntime"] == onnxruntime
    verify_files(engine, manifest)
    return OrtEngine(engine, manifest)


def build_torch_engine(
    target: Path, drafter: Path, engine: Path, *, precision: str = "fp32", **options: Any
) -> TorchEngine:
    """Build an engine of the torch backend in the directory `engine`, and load it on the CPU."""
    request = BuildRequest(
        target="pair",
        checkpoint=target,
        drafter=drafter,
        output=engine,
        backend="torch",
        precision=precision,  # type: ignore[arg-type]
        **options,
    )
    compile_engine(request)
    loaded = open_engine(engine, threads=1)
    assert isinstance(loaded, TorchEngine)
    return loaded
