"""Engines built for one test: of any pair."""

import json
from pathlib import Path
from typing import Any

import ddtree_trt
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.verify import verify_files
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.engines.torch.engine import TorchEngine

PACKAGED = Path(ddtree_trt.__file__).parent / "assets" / "tiny"
ROWS = [json.loads(row) for row in (PACKAGED / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
CHATS: list[Any] = [[{"role": "user", "content": row["prompt"]}] for row in ROWS]  # the packaged prompts


def build_engine(target: Path, drafter: Path, engine: Path, **options: Any) -> OrtEngine:
    """Build an engine in the directory `engine` and load it."""
    compile_engine(BuildRequest(target="pair", checkpoint=target, drafter=drafter, output=engine, **options))
    manifest = load_manifest(engine)
    verify_files(engine, manifest)
    return OrtEngine(engine, manifest)


def build_torch_engine(
    target: Path, drafter: Path, engine: Path, *, precision: str = "fp32", **options: Any
) -> TorchEngine:
    """Build an engine of the torch backend in the directory `engine`, and load it on the CPU."""
    made: Any = {"backend": "torch", "precision": precision, **options}
    compile_engine(BuildRequest(target="pair", checkpoint=target, drafter=drafter, output=engine, **made))
    loaded = open_engine(engine, threads=1)
    assert isinstance(loaded, TorchEngine)
    return loaded
