"""What an exported model says it needs, for every backend."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from fake_triton import read_config

from ddtree_trt import __version__
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.triton import export as triton
from ddtree_trt.triton.export import ExportRequest

RTX = {"tensorrt-rtx": "1.7.1.116", "gpus": "sm89 sm120"}
PLUGIN = {"name": "DDTreeAttention"}


@pytest.mark.parametrize(
    ("changes", "extra", "words", "absent"),
    [
        ({"backend": "onnxruntime"}, "", ["It runs on CPUs."], ["driver", "[", "make plugins"]),
        (
            {"backend": "tensorrt", "toolchain": {"tensorrt": "11.4.0.106", "sm": "90"}, "plugin": PLUGIN},
            "[tensorrt]",
            [
                "NVIDIA GPU (sm90) with driver 580",
                "with TensorRT 11.4.0.106",
                "libddtree_plugins.so, which `make plugins`",
            ],
            [],
        ),
        (
            {"backend": "tensorrt", "toolchain": {"tensorrt": "11.4.0.106", "sm": "120"}, "plugin": None},
            "[tensorrt]",
            ["NVIDIA GPU (sm120) with driver 580"],
            ["make plugins"],
        ),
        (
            {"backend": "tensorrt-rtx", "toolchain": RTX, "plugin": None},
            "[tensorrt-rtx]",
            ["NVIDIA GPU (sm89, sm120) with driver 580", "with TensorRT for RTX 1.7.1.116 and is for that release"],
            ["make plugins"],
        ),
        (
            {"backend": "torch", "precision": "bf16"},
            "[torch]",
            ["NVIDIA GPU with driver 580", "libddtree_torch.so, which `make plugins`"],
            ["built with"],
        ),
        ({"backend": "torch", "precision": "fp32"}, "[torch]", ["NVIDIA GPU with driver 580"], ["make plugins"]),
    ],
)
def test_the_model_names_what_its_backend_needs(
    tiny_engine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    extra: str,
    words: list[str],
    absent: list[str],
) -> None:
    """Extra, GPU, release and libraries, where the server's administrator reads them; and GPUs get instances."""
    manifest = dataclasses.replace(load_manifest(tiny_engine), **changes)
    monkeypatch.setattr(triton, "load_manifest", lambda directory: manifest)
    monkeypatch.setattr(triton, "verify_files", lambda *arguments: None)
    model = triton.export_triton(ExportRequest(tiny_engine, tmp_path / "models", link=True, instances=2))
    (group,) = read_config(model).instance_group
    on_gpu = manifest.backend != "onnxruntime"
    assert (group.Kind.Name(group.kind), group.count) == ("KIND_GPU" if on_gpu else "KIND_CPU", 2)
    assert list(group.gpus) == ([0] if on_gpu else [])
    readme, config = ((model / name).read_text() for name in ("README.md", "config.pbtxt"))
    assert f"must have `ddtree-trt{extra}=={__version__}`" in readme
    assert f"as ddtree-trt{extra}=={__version__}." in config
    assert readme.count(f"pip install '/path/to/a/checkout/of/ddtree-trt{extra}' 'numpy<2'") == 2
    needs = readme.split("when it is\nloaded. ")[1].split("```sh")[0]
    assert all(word in needs for word in words) and not any(word in needs for word in absent)
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert not extra or f"\n{extra[1:-1]} = [" in project
