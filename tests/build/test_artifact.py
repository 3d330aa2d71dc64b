"""The manifest survives a round trip and nothing else; an engine directory appears whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from engine_files import DIMS, FILES, make_engine, make_manifest

from ddtree_trt.artifact.files import MANIFEST, PROFILE, REQUIRED_FILES, newest_engine
from ddtree_trt.artifact.manifest import LOCAL, CheckpointIdentity, FileEntry, Limits, load_manifest, parse_manifest
from ddtree_trt.artifact.rebuild import rebuild_command
from ddtree_trt.artifact.verify import verify_files
from ddtree_trt.errors import ArtifactError

# The manifest


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"drafter_kind": "autoregressive", "drafter_dims": DIMS},
        {"plugin": {"name": "DDTreeAttention", "abi": "1"}, "backend": "tensorrt", "precision": "bf16"},
        {"backend": "tensorrt-rtx", "precision": "bf16"},
        {"golden_tau": {}, "stop_token_ids": (), "chat_template_args": {"nested": {"a": [1, None]}}},
        {"target_dims": dataclasses.replace(DIMS, rope_theta=1000000)},
    ],
)
def test_round_trip(changes: dict[str, Any]) -> None:
    manifest = make_manifest(**changes)
    again = parse_manifest(manifest.to_json(), "manifest.json")
    assert again == manifest
    assert type(again.drafter_dims) is type(manifest.drafter_dims)
    assert type(again.target_dims.rope_theta) is float


def test_what_computes_attention() -> None:
    """A manifest of before there was a choice names its plugin; one that names none is of native attention."""
    plugin = {"name": "DDTreeAttention", "abi": "2"}
    plans = {"precision": "bf16"}
    assert make_manifest().attention is None and make_manifest(backend="torch").attention is None
    assert make_manifest(backend="tensorrt", plugin=plugin, **plans).attention == "plugin"
    assert make_manifest(backend="tensorrt", **plans).attention == "native"
    rtx = make_manifest(backend="tensorrt-rtx", **plans)
    assert rtx.attention == "native"
    with pytest.raises(ArtifactError, match="it names a plugin, and TensorRT for RTX takes none"):
        parse_manifest(dataclasses.replace(rtx, plugin=plugin).to_json(), "m")


def test_the_command_that_rebuilds_plans() -> None:
    place, plans = Path("e"), {"precision": "bf16"}
    native = make_manifest(backend="tensorrt", **plans, toolchain={"tensorrt": "11.4", "row_independence": "yes"})
    assert "--backend tensorrt --precision bf16 --attention native --output" in rebuild_command(place, native)
    toolchain = {"tensorrt-rtx": "1.7", "row_independence": "no", "gpus": "sm89 sm120"}
    rtx = make_manifest(backend="tensorrt-rtx", **plans, toolchain=toolchain)
    assert "--precision bf16 --gpu sm89 --gpu sm120 --no-row-independence --output" in rebuild_command(place, rtx)


def test_native_attention_needs_a_plan_that_compacts(tmp_path: Path) -> None:
    files = {n: FileEntry(0, "0" * 64) for n in REQUIRED_FILES["tensorrt"]}
    manifest = make_manifest(backend="tensorrt", precision="bf16", files=files)
    (tmp_path / "manifest.json").write_text(manifest.to_json())
    with pytest.raises(ArtifactError, match=r"does not list compaction\.plan; rebuild with"):
        verify_files(tmp_path, manifest)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("schema_version",), 99, "schema version 99, this ddtree-trt reads version 1; rebuild with"),
        (("backend",), "abacus", "'torch' or 'tensorrt' or 'tensorrt-rtx', found 'abacus'"),
        (("name",), 5, "m: name must be a name of letters, digits, '.', '_' and '-', found 5"),
        (("build_seconds",), True, "m: build_seconds must be a number from 0 to 1e+09, found true"),
        (("limits", "max_batch"), "8", "m: limits.max_batch must be an integer from 1 to 1024, found '8'"),
        (("limits", "max_batch"), 8.0, "m: limits.max_batch must be an integer from 1 to 1024, found 8.0"),
        (("limits", "colour"), 1, "m: limits has unknown fields ['colour'], lacks fields []"),
        (("limits",), [1], "m: limits must be an object, found [1]"),
        (("target_dims",), None, "m: target_dims must be an object, found null"),
        (
            ("drafter_dims", "tap_layers"),
            [0, "x"],
            "m: drafter_dims.tap_layers[1] must be an integer from 0 to 999",
        ),
        (("drafter_dims", "tap_layers"), 3, "m: drafter_dims.tap_layers must be a list, found 3"),
        (("golden_tau", "ddtree"), [1.0], "m: golden_tau.ddtree must be a list of 2 entries"),
        (("files", "weights.bin", "size"), None, "m: files.'weights.bin'.size must be an integer"),
        (("tensors", "target", "inputs"), [1], "m: tensors.target.inputs[0] must be a text"),
        (("plugin",), {"abi": 1}, "m: plugin.abi must be a text"),
        (("drafter_kind",), "autoregressive", "m: drafter_dims has unknown fields ['block_size'"),
    ],
)
def test_a_wrong_field_is_named(place: tuple[str, ...], value: Any, message: str) -> None:
    data = json.loads(make_manifest().to_json())
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(ArtifactError) as caught:
        parse_manifest(json.dumps(data), "m")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("[]", "no schema_version"), ("{}", "no schema_version")]
)
def test_not_a_manifest(text: str, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        parse_manifest(text, "m")


def test_missing_field_is_named() -> None:
    data = json.loads(make_manifest().to_json())
    del data["limits"]
    with pytest.raises(ArtifactError, match=r"lacks fields \['limits'\]"):
        parse_manifest(json.dumps(data), "m")


def test_rebuild_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert rebuild_command(Path("engines/pair"), make_manifest()) == (
        "ddtree-trt build --target pair --checkpoint org/target@abc --drafter org/drafter@def "
        "--chat-template-arg enable_thinking=false --backend onnxruntime --precision fp32 --force"
    )
    local = CheckpointIdentity("mine", LOCAL, "0" * 64)
    manifest = make_manifest(target=local, drafter=local, limits=Limits(max_seq_len=99), chat_template_args={})
    command = rebuild_command(Path("elsewhere"), manifest)
    assert command == (
        "ddtree-trt build --target pair --checkpoint DIR --drafter DIR --max-seq-len 99 --backend onnxruntime "
        "--precision fp32 --output elsewhere --force"
    )


def test_newest_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match="no engine under engines/; build one with"):
        newest_engine()
    for age, name in ((100, "newer"), (200, "older"), (0, ".newest.tmp-1-00ff")):
        make_engine(tmp_path / "engines" / name)
        os.utime(tmp_path / "engines" / name / MANIFEST, (1e9 - age, 1e9 - age))
    assert newest_engine() == Path("engines/newer")


# Verification


def test_a_whole_engine_is_verified_with_progress(tmp_path: Path) -> None:
    manifest = make_engine(tmp_path / "e")
    (tmp_path / "e" / PROFILE).write_text("measured here")  # another machine has another profile
    calls: list[tuple[str, int, int]] = []
    verify_files(tmp_path / "e", load_manifest(tmp_path / "e"), lambda *call: calls.append(call))
    total = sum(entry.size for entry in manifest.files.values())
    assert calls[-1] == ("verify files", total, total)
    assert [c[1] for c in calls] == sorted(c[1] for c in calls)


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_any_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    make_engine(tmp_path / "e")
    path = tmp_path / "e" / name
    whole = path.read_bytes()
    step = max(1, len(whole) // 97)
    for position in range(0, len(whole), step):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        if name == MANIFEST and _same_json(bytes(damaged), whole):
            continue  # a flip in the white space between two fields changes nothing
        with pytest.raises(ArtifactError) as caught:
            verify_files(tmp_path / "e", load_manifest(tmp_path / "e"))
        assert "rebuild" in str(caught.value) and "\n" not in str(caught.value)
    path.write_bytes(whole)
    verify_files(tmp_path / "e", load_manifest(tmp_path / "e"))


def _same_json(left: bytes, right: bytes) -> bool:
    try:
        return bool(json.loads(left) == json.loads(right))
    except ValueError:
        return False


def verify_refusal(engine: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        verify_files(engine, load_manifest(engine))
    return str(caught.value)


def test_truncated_missing_and_unlisted_files(tmp_path: Path) -> None:
    engine = tmp_path / "e"
    manifest = make_engine(engine)
    (engine / "target.onnx").write_text("short")
    assert "target.onnx has 5 bytes, the manifest says 1100; rebuild with:" in verify_refusal(engine)
    (engine / "target.onnx").unlink()
    assert "target.onnx is missing" in verify_refusal(engine)
    (engine / "target.onnx").write_text("target.onnx" * 100)
    fewer = {name: entry for name, entry in manifest.files.items() if name != "weights.bin"}
    (engine / MANIFEST).write_text(dataclasses.replace(manifest, files=fewer).to_json())
    assert "does not list weights.bin" in verify_refusal(engine)
    outside = {**manifest.files, "../secret": FileEntry(1, "0" * 64)}
    (engine / MANIFEST).write_text(dataclasses.replace(manifest, files=outside).to_json())
    assert "files: the name must be a name of letters, digits" in verify_refusal(engine)


def test_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    make_engine(tmp_path / "e")
    path = tmp_path / "e" / MANIFEST
    data = json.loads(path.read_text())
    data["limits"]["max_seq_len"] = 1 << 10
    path.write_text(json.dumps(data))
    assert "is damaged or was edited" in verify_refusal(tmp_path / "e")
    del data["digest"]
    path.write_text(json.dumps(data))
    assert "is damaged or was edited" in verify_refusal(tmp_path / "e")


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("Qwen/Qwen3-8B", "of a model of the Hugging Face hub build one with: {build} --checkpoint Qwen/Qwen3-8B --dr"),
        ("README.md", "README.md is a file, and an engine directory is expected"),
        ("engines/qwen3-8b", "no engine at engines/qwen3-8b; build one with: {build} --target qwen3-8b"),
        ("engines", "engines is not an engine directory: it has no manifest.json; give one that {build} wrote"),
        ("engines/-x", "build one there with: {build} --target tiny --output engines/-x"),
        ("some where/else", "build one there with: {build} --target tiny --output 'some where/else'"),
        (
            "model",
            "is a checkpoint, and an engine directory is expected; build one of it with: {build} --checkpoint model",
        ),
        ("m.gguf", "m.gguf is a checkpoint, and an engine directory is expected; build one of it with: {build} --ch"),
    ],
)
def test_what_to_do_depends_on_what_was_given(
    given: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("engines", "model", "README.md", "m.gguf", "model/config.json"):
        path = Path(folder)
        path.touch() if path.suffix else path.mkdir()
    with pytest.raises(ArtifactError) as caught:
        load_manifest(Path(given))
    assert advice.format(build="ddtree-trt build") in str(caught.value)


def test_no_engine(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is not an engine directory"):
        load_manifest(tmp_path)
    (tmp_path / MANIFEST).write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(ArtifactError, match="is not valid JSON"):
        load_manifest(tmp_path)
