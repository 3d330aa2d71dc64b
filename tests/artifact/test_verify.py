"""The record of checked files: when files are read again, and that no change of a file passes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pacing import wait_for

from ddtree_trt.artifact import verify as verified
from ddtree_trt.artifact.files import VERIFIED, WEIGHTS
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.verify import verify_files, verify_for_opening
from ddtree_trt.errors import ArtifactError
from ddtree_trt.runtime.engines.load import open_engine

ALWAYS = -(1 << 62)  # nanoseconds: every file counts as settled


@pytest.fixture
def engine(tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine directory without a record, whose files count as settled. What is written later has a later time."""
    monkeypatch.setattr(verified, "_SETTLED_NS", ALWAYS)
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
    original = verify_files

    def counting(directory: Path, *others: object) -> None:
        read.append(directory)
        original(directory, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(verified, "verify_files", counting)
    return read


def opened(directory: Path) -> None:
    verify_for_opening(directory, load_manifest(directory))


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))


def test_files_are_read_once(engine: Path, reads: list[Path]) -> None:
    for _ in range(3):
        open_engine(engine).close()
    assert reads == [engine] and (engine / VERIFIED).is_file()


def in_place_with_its_old_time(path: Path) -> None:
    before = path.stat()
    damage(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def by_another_file(path: Path) -> None:
    other = path.with_name("other")
    before = path.stat()
    shutil.copy2(path, other)
    damage(other)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


def by_a_link(path: Path) -> None:
    other = path.parent.parent / "elsewhere"
    shutil.copy2(path, other)
    damage(other)
    path.unlink()
    path.symlink_to(other)


@pytest.mark.parametrize("change", [damage, in_place_with_its_old_time, by_another_file, by_a_link])
def test_every_change_is_found(engine: Path, change: Callable[[Path], None]) -> None:
    opened(engine)
    change(engine / WEIGHTS)
    for _ in range(2):  # and is not recorded
        with pytest.raises(ArtifactError, match="damaged"):
            opened(engine)


def test_a_copy_is_read_again(engine: Path, reads: list[Path]) -> None:
    opened(engine)
    copy = engine.with_name("copy")
    shutil.copytree(engine, copy)  # with its record, and with the files' times
    opened(copy)
    opened(copy)
    assert reads == [engine, copy]


def test_a_record_of_other_digests_does_not_count(engine: Path, reads: list[Path]) -> None:
    opened(engine)
    record = engine / VERIFIED
    entry = load_manifest(engine).files[WEIGHTS]
    record.write_text(record.read_text().replace(entry.sha256, "0" * 64))
    opened(engine)
    assert reads == [engine, engine]


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b"\xff", None])
def test_an_unreadable_record_does_not_count(engine: Path, reads: list[Path], content: bytes | None) -> None:
    if content is None:
        (engine / VERIFIED).mkdir()  # cannot be replaced either
    else:
        (engine / VERIFIED).write_bytes(content)
    opened(engine)
    opened(engine)
    assert reads == [engine] * (2 if content is None else 1)


def test_a_file_just_written_is_not_recorded(engine: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It could be written once more within the same tick of the clock."""
    monkeypatch.setattr(verified, "_SETTLED_NS", 1 << 62)
    opened(engine)
    opened(engine)
    assert reads == [engine, engine] and not (engine / VERIFIED).exists()


def test_a_file_that_changes_meanwhile_is_not_recorded(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "verify_files", lambda directory, *_: damage(directory / WEIGHTS))
    opened(engine)
    assert not (engine / VERIFIED).exists()


def test_a_directory_that_cannot_be_written(
    engine: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(verified, "write_atomically", refuse)
    opened(engine)
    opened(engine)
    assert reads == [engine, engine] and not caplog.records
