"""The manifest: a round trip, every wrong field named, and what is advised where there is no engine."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_files import DIMS, make_engine, make_manifest
from fuzzing import WRONG, place_name, places, with_value
from pacing import wait_for

from ddtree_trt.artifact import verify as verified
from ddtree_trt.artifact.files import MANIFEST, VERIFIED, WEIGHTS, newest_engine
from ddtree_trt.artifact.manifest import LOCAL, CheckpointIdentity, Limits, load_manifest, parse_manifest
from ddtree_trt.artifact.verify import rebuild_command, verify_files, verify_for_opening
from ddtree_trt.errors import ArtifactError
from ddtree_trt.models.rope_scaling import RopeScaling
from ddtree_trt.runtime.engines.load import open_engine


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"drafter_kind": "autoregressive", "drafter_dims": DIMS},
        {"plugin": {"name": "DDTreeAttention", "abi": "1"}, "backend": "tensorrt", "precision": "bf16"},
        {"backend": "tensorrt-rtx", "precision": "bf16"},
        {"golden_tau": {}, "stop_token_ids": (), "chat_template_args": {"nested": {"a": [1, None]}}},
        {"target_dims": replace(DIMS, rope_theta=1000000)},
        {"target_dims": replace(DIMS, qk_norm=False, qkv_bias=True, rope_scaling=RopeScaling("linear", 2.0))},
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
        parse_manifest(replace(rtx, plugin=plugin).to_json(), "m")


def refusal(place: Sequence[Any], value: Any) -> str:
    """The line with which a manifest with another value there is refused."""
    changed = with_value(json.loads(make_manifest().to_json()), place, value)
    with pytest.raises(ArtifactError) as caught:
        parse_manifest(json.dumps(changed), "m")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000
    return str(caught.value)


def test_a_value_of_another_kind_is_refused_by_its_place() -> None:
    for place, value in places(json.loads(make_manifest().to_json())):
        if place[0] in ("schema_version", "digest") or (place[0] == "chat_template_args" and len(place) > 1):
            continue  # of which the first two have lines of their own, and a template's arguments are anything
        for wrong in WRONG[type(value)]:
            assert refusal(place, wrong).replace("'", "").startswith(f"m: {place_name(place)}"), (place, wrong)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("schema_version", "\x1b[2J", "has schema version '\\x1b[2J'"),
        ("backend", "abacus", "'torch', 'tensorrt' or 'tensorrt-rtx', found 'abacus'"),
        ("precision", "fp16", "precision is fp16, which the onnxruntime backend does not compute in"),
        *(
            ("name", name, "m: name must be a name of letters, digits")
            for name in ("x; rm -rf ~", "\x1b[2Jx", "--help")
        ),
        ("limits.max_seq_len", 1 << 26, "is more than the models' 2048 positions"),
        ("limits.colour", 1, "m: limits.colour is unknown; rebuild the engine"),
        ("target_dims.num_layers", 1, "num_target_layers is 2, the target's layers 1"),
        ("target_dims.rope_scaling", {"rope_type": "longrope"}, "rope_type must be 'linear', 'llama3' or 'yarn'"),
        ("drafter_kind", "autoregressive", "m: drafter_dims.block_size is unknown"),
        ("drafter_dims.tap_layers", [0, 7], "target_layer_ids [7] are not layers of the target"),
        ("stop_token_ids", [96], "stop_token_ids [96] are not below vocab_size 96"),
        ("golden_tau.ddtree", [1.0], "m: golden_tau.ddtree[1] is missing"),
        *(
            ("files", {name: {"size": 1, "sha256": "0" * 64}}, "files: a key must be a name of letters, digits")
            for name in ("../secret", "/etc/passwd", "a/b", "..", ".hidden", "a\x00b", "-rf", "")
        ),
    ],
)
def test_what_cannot_be_is_refused(place: str, value: Any, message: str) -> None:
    assert message in refusal(place.split("."), value)


def test_rebuild_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert rebuild_command(Path("engines/pair"), make_manifest()) == (
        "ddtree-trt build --target pair --checkpoint org/target@abc --drafter org/drafter@def "
        "--max-seq-len 2048 --max-tree-budget 256 --max-batch 8 "
        "--chat-template-arg enable_thinking=false --backend onnxruntime --precision fp32 --force"
    )
    local = CheckpointIdentity("mine", LOCAL, "0" * 64)
    manifest = make_manifest(
        target=local, drafter=local, limits=Limits(max_seq_len=99, snapshot_every=64), chat_template_args={}
    )
    assert rebuild_command(Path("elsewhere"), manifest) == (
        "ddtree-trt build --target pair --checkpoint DIR --drafter DIR --max-seq-len 99 --max-tree-budget 256 "
        "--max-batch 8 --snapshot-every 64 --backend onnxruntime --precision fp32 --output elsewhere --force"
    )


def test_newest_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match="no engine under engines/; build one with"):
        newest_engine()
    for age, name in ((100, "newer"), (200, "older"), (0, ".newest.tmp-1-00ff")):
        make_engine(tmp_path / "engines" / name)
        os.utime(tmp_path / "engines" / name / MANIFEST, (1e9 - age, 1e9 - age))
    assert newest_engine() == Path("engines/newer")


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("Qwen/Qwen3-8B", "one of that model of the Hugging Face hub with: {build} --checkpoint Qwen/Qwen3-8B --dr"),
        ("engines/qwen3-8b", "no engine at engines/qwen3-8b; build one with: {build} --target qwen3-8b"),
        ("engines", "engines is not an engine directory: it has no manifest.json; give one that {build} wrote"),
        ("some where/else", "build one there with: {build} --target tiny --output 'some where/else'"),
        ("model", "{checkpoint} --checkpoint model"),
        ("m.gguf", "m.gguf {checkpoint} --checkpoint m.gguf"),
    ],
)
def test_what_to_do_depends_on_the_path(
    given: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("engines", "model", "README.md", "m.gguf", "model/config.json"):
        path = Path(folder)
        path.touch() if path.suffix else path.mkdir()
    with pytest.raises(ArtifactError) as caught:
        load_manifest(Path(given))
    build = "ddtree-trt build"
    checkpoint = f"is a checkpoint, not an engine directory; build one of it with: {build}"
    assert advice.format(build=build, checkpoint=checkpoint) in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "is not valid JSON.*; rebuild the engine"),
        (b"[]", "no schema_version; rebuild the engine"),
        (b"\xff\xfe\xfd", "is not valid JSON"),
        (b" " * (5 << 20), "more than 4 MiB; rebuild the"),
    ],
    ids=range(4),
)
def test_not_a_manifest(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / MANIFEST).write_bytes(data)
    with pytest.raises(ArtifactError, match=message):
        load_manifest(tmp_path)


# No change of an engine's files passes, and files that were checked are not read again


def unlisted(engine: Path, name: str) -> None:
    manifest = load_manifest(engine)
    fewer = {file: entry for file, entry in manifest.files.items() if file != name}
    (engine / MANIFEST).write_text(dataclasses.replace(manifest, files=fewer).to_json())


def edited(engine: Path, digest: bool) -> None:
    data = json.loads((engine / MANIFEST).read_text())
    data["limits"]["max_seq_len"] = 1 << 10
    if not digest:
        del data["digest"]
    (engine / MANIFEST).write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: (e / "target.onnx").write_text("short"), "has 5 bytes, the manifest says 1100; rebuild"),
        (lambda e: (e / "target.onnx").unlink(), "target.onnx is missing"),
        (lambda e: unlisted(e, "weights.bin"), "does not list weights.bin"),
        (lambda e: edited(e, digest=True), "is damaged or was edited"),
        (lambda e: edited(e, digest=False), "is damaged or was edited"),
    ],
)
def test_what_is_not_as_it_was_built(tmp_path: Path, change: Callable[[Path], object], message: str) -> None:
    make_engine(tmp_path / "e")
    change(tmp_path / "e")
    with pytest.raises(ArtifactError) as caught:
        verify_files(tmp_path / "e", load_manifest(tmp_path / "e"))
    assert message in str(caught.value)


@pytest.fixture
def engine(tiny_engine: Path, tmp_path: Path) -> Path:
    """An engine directory without a record. What is written later has a later time."""
    directory = tmp_path / "e"
    shutil.copytree(tiny_engine, directory)
    (directory / VERIFIED).unlink(missing_ok=True)
    last = max(path.stat().st_ctime_ns for path in directory.iterdir())
    wait_for(lambda: (tmp_path / "probe").write_bytes(b"") == 0 and (tmp_path / "probe").stat().st_ctime_ns > last)
    return directory


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories whose files were read through."""
    read: list[Path] = []

    def counting(directory: Path, *others: object) -> None:
        read.append(directory)
        verify_files(directory, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(verified, "verify_files", counting)
    return read


def opened(directory: Path) -> None:
    verify_for_opening(directory, load_manifest(directory))


def damage(path: Path) -> None:
    """Another byte, and the time of before."""
    before = path.stat()
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(bytes([data[1000] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def by_another_file(path: Path, *, link: bool = False) -> None:
    other = path.parent.parent / "elsewhere"
    shutil.copy2(path, other)
    damage(other)
    path.unlink()
    path.symlink_to(other) if link else other.rename(path)


def test_files_are_read_once_and_a_copy_again(engine: Path, reads: list[Path]) -> None:
    for _ in range(3):
        open_engine(engine).close()
    assert reads == [engine]
    copy = shutil.copytree(engine, engine.with_name("copy"))  # with its record, and with the files' times
    opened(copy)
    opened(copy)
    assert reads == [engine, copy]


@pytest.mark.parametrize("change", [damage, by_another_file, partial(by_another_file, link=True)])
def test_every_change_is_found(engine: Path, change: Callable[[Path], None]) -> None:
    opened(engine)
    change(engine / WEIGHTS)
    for _ in range(2):  # and is not recorded
        with pytest.raises(ArtifactError, match="damaged"):
            opened(engine)


def test_a_change_while_files_are_read_is_found(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "verify_files", lambda directory, *_: damage(directory / WEIGHTS))
    opened(engine)
    monkeypatch.undo()
    with pytest.raises(ArtifactError, match="damaged"):
        opened(engine)


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b"\xff", "another digest", None])
def test_a_record_that_is_none_does_not_count(engine: Path, reads: list[Path], content: bytes | str | None) -> None:
    if content is None:
        (engine / VERIFIED).mkdir()  # cannot be replaced either: so it is in a read-only directory
    elif isinstance(content, str):
        opened(engine)
        record, digest = engine / VERIFIED, load_manifest(engine).files[WEIGHTS].sha256
        record.write_text(record.read_text().replace(digest, "0" * 64))
        reads.clear()
    else:
        (engine / VERIFIED).write_bytes(content)
    opened(engine)
    opened(engine)
    assert reads == [engine] * (2 if content is None else 1)
