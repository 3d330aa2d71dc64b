"""No change of an engine's files passes, and files that were checked are not read again."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from engine_files import FILES, make_engine
from pacing import wait_for

from ddtree_trt.artifact import verify as verified
from ddtree_trt.artifact.files import MANIFEST, PROFILE, VERIFIED, WEIGHTS
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.verify import verify_files, verify_for_opening
from ddtree_trt.errors import ArtifactError
from ddtree_trt.runtime.engines.load import open_engine


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
    for position in range(0, len(whole), max(1, len(whole) // 97)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with suppress(ValueError):
            if name == MANIFEST and json.loads(damaged) == json.loads(whole):
                continue  # a flip in the white space between two fields changes nothing
        with pytest.raises(ArtifactError) as caught:
            verify_files(tmp_path / "e", load_manifest(tmp_path / "e"))
        assert "rebuild" in str(caught.value) and "\n" not in str(caught.value)
    path.write_bytes(whole)
    verify_files(tmp_path / "e", load_manifest(tmp_path / "e"))


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
        (
            lambda e: (e / "target.onnx").write_text("short"),
            "target.onnx has 5 bytes, the manifest says 1100; rebuild",
        ),
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


# The record of files that were checked


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
