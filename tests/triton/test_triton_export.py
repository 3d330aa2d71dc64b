"""`export-triton`: what it writes, and what it refuses to overwrite. No server is needed."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_triton import read_config
from google.protobuf import json_format
from typer.testing import CliRunner

from ddtree_trt import __version__
from ddtree_trt.artifact.files import EXPORT, KERNEL_CACHE
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.verify import verify_files
from ddtree_trt.cli import app
from ddtree_trt.errors import ArtifactError, BuildError, UsageError
from ddtree_trt.triton import export as triton
from ddtree_trt.triton.export import export_triton
from ddtree_trt.triton.layouts import LAYOUTS
from ddtree_trt.triton.service import Settings, select_device


@pytest.fixture
def engine(tiny_engine: Path, tmp_path: Path) -> Path:
    """An engine of this test's own."""
    return shutil.copytree(tiny_engine, tmp_path / "engines" / "tiny")


def config_dict(model: Path) -> dict[str, Any]:
    return json_format.MessageToDict(read_config(model), preserving_proto_field_name=True)


@pytest.mark.parametrize(("layout", "batch"), [("trtllm", 1), ("vllm", 0)])
@pytest.mark.parametrize(("name", "gpus"), [(None, ()), ("qwen3-8b.v2", (2, 5))])
def test_the_configuration_says_what_was_asked_for(
    tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Any, batch: int, name: Any, gpus: Any
) -> None:
    manifest = dataclasses.replace(load_manifest(tiny_engine), backend="tensorrt" if gpus else "onnxruntime")
    monkeypatch.setattr(triton, "load_manifest", lambda _: manifest)
    monkeypatch.setattr(triton, "verify_files", lambda *_: None)
    options = {"layout": layout, "link": True, "instances": 3, "gpus": gpus, "max_queue": 0}
    model = export_triton(tiny_engine, tmp_path / "models", name, **options)
    config = read_config(model)
    assert config.name == model.name == (name or "tiny") and config.backend == "python"
    assert config.max_batch_size == batch and config.model_transaction_policy.decoupled
    (group,) = config.instance_group
    assert (group.count, list(group.gpus)) == (3, list(gpus))
    assert group.Kind.Name(group.kind) == ("KIND_GPU" if gpus else "KIND_CPU")
    assert {p.name for p in (model / "1").iterdir()} == {"model.py", "engine"}
    settings = Settings.read(config_dict(model))
    assert (settings.layout.name, settings.max_queue, settings.threads) == (layout, 0, 0)
    figures = {"acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"}
    assert settings.outputs > {"text_output", "finish_reason"} | figures
    assert "${" not in (model / "README.md").read_text() + (model / "config.pbtxt").read_text()
    declared = [i.name for i in config.input]
    assert len(declared) == len(set(declared)) and [i.name for i in config.input if not i.optional] == ["text_input"]
    assert set(declared) == LAYOUTS[layout].inputs.keys()


def test_a_copied_engine_is_whole_and_the_repository_can_move(engine: Path, tmp_path: Path) -> None:
    model = export_triton(engine, repository := tmp_path / "my models")
    assert f"--model-repository='{repository}' " in (model / "README.md").read_text()
    shutil.rmtree(engine)
    moved = repository.rename(tmp_path / "elsewhere") / "tiny" / "1" / "engine"
    verify_files(moved, load_manifest(moved))
    assert (moved / "profile.json").is_file()


def test_a_linked_engine_is_found_by_a_relative_path(engine: Path, tmp_path: Path) -> None:
    model = export_triton(engine, tmp_path / "a" / "b" / "models", link=True)
    assert not Path(os.readlink(model / "1" / "engine")).is_absolute()
    assert (model / "1" / "engine").resolve() == engine.resolve()
    moved = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    assert load_manifest(moved / "a/b/models/tiny/1/engine").name == "tiny"


def test_an_export_is_replaced_where_the_user_says_so(engine: Path, tmp_path: Path) -> None:
    model = export_triton(engine, tmp_path / "models")
    (model / "1" / "__pycache__").mkdir()
    (model / "1" / "__pycache__" / "model.pyc").write_bytes(b"x")  # as a server leaves it
    (model / "1" / "engine" / KERNEL_CACHE).write_bytes(b"x")  # as TensorRT for RTX does
    assert export_triton(engine, tmp_path / "models", layout="vllm", link=True, force=True) == model
    assert read_config(model).max_batch_size == 0
    assert (model / "1" / "engine").is_symlink()
    assert export_triton(engine, tmp_path / "models", force=True) == model
    assert not (model / "1" / "engine").is_symlink()
    assert sorted(p.name for p in (tmp_path / "models").iterdir()) == ["tiny"]


def test_a_directory_that_no_export_wrote_is_not_replaced(engine: Path, tmp_path: Path) -> None:
    model = export_triton(engine, tmp_path / "models")
    with pytest.raises(BuildError, match="give --force to replace it"):
        export_triton(engine, tmp_path / "models")
    (model / EXPORT).unlink()
    with pytest.raises(BuildError, match="was not written by ddtree-trt"):
        export_triton(engine, tmp_path / "models", force=True)
    assert read_config(model).name == "tiny"


def test_a_damaged_engine_is_refused(engine: Path, tmp_path: Path) -> None:
    (engine / "weights.bin").write_bytes(b"short")
    with pytest.raises(ArtifactError, match=r"weights\.bin has 5 bytes"):
        export_triton(engine, tmp_path / "models")
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"instances": 0}, "instances must be from 1 to 64, not 0"),
        ({"gpus": (0,)}, "--gpus is for engines that run on GPUs"),
        ({"gpus": (1, 1)}, "gpus must be different numbers"),
        ({"model_name": "../up"}, "cannot name a model"),
    ],
)
def test_wrong_calls(tiny_engine: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        export_triton(tiny_engine, tmp_path / "models", **options)
    assert not (tmp_path / "models").exists()


def test_the_engine_and_the_model_may_not_lie_inside_each_other(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="lies inside the engine directory"):
        export_triton(engine, engine / "models")
    model = export_triton(engine, tmp_path / "models")
    with pytest.raises(UsageError, match="which would be replaced"):
        export_triton(model / "1" / "engine", tmp_path / "models")
    assert export_triton(model / "1" / "engine", tmp_path / "models", "second").is_dir()


@pytest.mark.parametrize(
    ("kind", "device", "visible", "expected"),
    [("CPU", "0", None, None), ("GPU", "1", None, "1"), ("GPU", "1", "4,6", "6"), ("GPU", "0", "GPU-abc", "GPU-abc")],
)
def test_an_instance_sees_its_gpu_only(kind: str, device: str, visible: str | None, expected: str | None) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    select_device(kind, device, environment)
    assert environment.get("CUDA_VISIBLE_DEVICES") == expected


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ddtree_trt_version", "0.0.1", rf"exported by ddtree-trt 0.0.1, the server's Python .* has {__version__}"),
        ("layout", "other", "layout must be one of trtllm, vllm"),
        ("max_queue", "-1", "max_queue and threads whole numbers"),
        ("threads", None, "max_queue and threads whole numbers"),
    ],
)
def test_an_edited_config_is_refused_with_a_reason(
    tiny_engine: Path, tmp_path: Path, key: str, value: str | None, message: str
) -> None:
    config = config_dict(export_triton(tiny_engine, tmp_path / "models", link=True))
    if value is None:
        del config["parameters"][key]
    else:
        config["parameters"][key]["string_value"] = value
    with pytest.raises(ArtifactError, match=message):
        Settings.read(config)


def test_the_command(engine: Path, tmp_path: Path) -> None:
    arguments = ["export-triton", str(engine), str(tmp_path / "models")]
    done = CliRunner().invoke(app, [*arguments, "--model-name", "m", "--layout", "vllm", "--link", "--max-queue", "9"])
    assert done.exit_code == 0
    assert f"exported {tmp_path / 'models' / 'm'}: vllm layout, linked engine" in done.stdout
    assert Settings.read(config_dict(tmp_path / "models" / "m")).max_queue == 9
    (tmp_path / "models" / "m" / "mine").write_text("x")
    assert CliRunner().invoke(app, [*arguments, "--model-name", "m"]).exit_code == BuildError.exit_code == 1
