"""An engine directory appears whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ddtree_trt.artifact.files import MANIFEST
from ddtree_trt.build import directory as writer
from ddtree_trt.build.directory import atomic_directory, prepare_destination
from ddtree_trt.errors import BuildError


def write_engine(destination: Path, content: str, *, force: bool = False) -> None:
    with atomic_directory(destination, force=force) as temporary:
        (temporary / "data").write_text(content)
        assert not (destination / "data").exists() or (destination / "data").read_text() != content
        (temporary / MANIFEST).write_text("{}")


def hidden(parent: Path) -> list[str]:
    return [p.name for p in parent.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("exchange", [True, False])
def test_new_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr("ctypes.CDLL", lambda *args, **kwargs: object())
    destination = tmp_path / "deep" / "engine"
    destination.mkdir(parents=True)  # an empty directory is no engine
    write_engine(destination, "one")
    write_engine(destination, "two", force=True)
    assert (destination / "data").read_text() == "two"
    assert hidden(destination.parent) == []
    umask = os.umask(0o22)
    os.umask(umask)
    assert destination.stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_link_to_an_engine_keeps_pointing_at_it(tmp_path: Path) -> None:
    write_engine(tmp_path / "engine", "one")
    (tmp_path / "link").symlink_to("engine")
    write_engine(tmp_path / "link", "two", force=True)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "engine" / "data").read_text() == "two"


def test_what_another_build_has_written_meanwhile_stays(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"cannot write .*; nothing was changed"):  # noqa: SIM117
        with atomic_directory(tmp_path / "engine", force=False) as temporary:
            (temporary / "data").write_text("slow")
            write_engine(tmp_path / "engine", "one")
    assert (tmp_path / "engine" / "data").read_text() == "one" and hidden(tmp_path) == []


def test_what_must_not_be_replaced(tmp_path: Path) -> None:
    write_engine(tmp_path / "engine", "one")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    (tmp_path / "file").write_text("text")
    for name, force, message in (
        ("engine", False, "give --force to replace it"),
        ("home", True, "was not written by ddtree-trt"),
        ("file", True, "is not a directory"),
        ("/proc/engine", False, "cannot write /proc/engine: .*; nothing was changed, choose another path"),
        ("file/engine", True, "cannot write .*/engine: .*/file is not a directory"),
    ):
        with pytest.raises(BuildError, match=message):
            prepare_destination(tmp_path / name, force=force)
    assert (tmp_path / "home" / "letter").exists()


def test_a_failed_exchange_puts_the_old_engine_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = tmp_path / "engine"
    write_engine(destination, "old")
    monkeypatch.setattr("ctypes.CDLL", lambda *args, **kwargs: object())
    rename, calls = os.rename, []

    def failing(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr("os.rename", failing)
    with pytest.raises(BuildError, match="Input/output error"):
        write_engine(destination, "new", force=True)
    assert (destination / "data").read_text() == "old"
    assert hidden(tmp_path) == []


def test_leftovers_of_killed_builds_are_removed_and_nothing_else(tmp_path: Path) -> None:
    stale = tmp_path / ".engine.tmp-4711-00ff"  # below: a build that is running, of another name, none of ours
    others = [tmp_path / name for name in (".engine.tmp-4712-00ff", ".engine2.tmp-4711-00ff", ".engine.tmp-note")]
    for path in (stale, *others):
        path.mkdir()
        (path / "data").write_text("x")
    (tmp_path / ".engine.tmp-4713-0001").symlink_to(others[2])
    lock = writer._lock(others[0])
    write_engine(tmp_path / "engine", "one")
    assert not stale.exists() and all((path / "data").exists() for path in others)
    os.close(lock)
    write_engine(tmp_path / "engine", "two", force=True)
    assert not others[0].exists()


def test_an_engine_moved_aside_by_a_killed_build_comes_back(tmp_path: Path) -> None:
    write_engine(tmp_path / "engine", "old")
    (tmp_path / "engine").rename(tmp_path / ".engine.tmp-4711-00ff.old")
    with pytest.raises(BuildError, match="--force"):
        prepare_destination(tmp_path / "engine", force=False)
    assert (tmp_path / "engine" / "data").read_text() == "old"
