"""Check that an engine's files are those that were built, and record it, which spares later openings reading them all.

A file is taken for the one that was checked while device, inode, size, and the times of its last change in nanoseconds
are as they were, and the manifest names the same digest. Whatever rewrites a file moves its ctime, which no program can
set; a copy has another inode. What a record cannot show are bits that decay on a disk, and writes on another machine
that a network file system has not reported yet: reading all files again finds these.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from ddtree_trt.artifact.files import MANIFEST, REQUIRED_FILES, VERIFIED, sha256_file
from ddtree_trt.artifact.manifest import Manifest, digest_holds
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.artifact.rebuild import rebuild_command
from ddtree_trt.errors import ArtifactError, UsageError, shown
from ddtree_trt.files import write_atomically
from ddtree_trt.reading import Source, read_json, read_record

_READERS = 4  # files read at a time
SWITCH = "DDTREE_VERIFY"  # environment: "stat", the default, or "full"
_VERSION = 1
# A file written in the moment it was checked could be written once more without another time: it is not recorded.
_SETTLED_NS = 2_000_000_000

_log = logging.getLogger(__name__)


def verify_files(directory: Path, manifest: Manifest, progress: Progress = no_progress) -> None:
    """Check the manifest's own digest, then size and digest of every file of the engine, before any is opened. Several
    files are read at a time.

    Raises ArtifactError that names the file and the command that rebuilds the engine.
    """
    rebuild = check_listed(directory, manifest)
    with _Digests(directory, manifest, progress) as digests:
        for (name, entry), digest in zip(manifest.files.items(), digests, strict=True):
            path = directory / name
            if isinstance(digest, OSError):
                raise ArtifactError(f"{path} cannot be read ({digest.strerror}); {rebuild}") from digest
            if digest != entry.sha256:
                raise ArtifactError(f"{path} is damaged: its sha256 differs from the manifest's; {rebuild}")


def check_listed(directory: Path, manifest: Manifest) -> str:
    """Check the manifest's own digest, and that the engine's files are listed, exist and have their sizes; returns the
    advice for errors about them. Raises ArtifactError as `verify_files` does."""
    path = directory / MANIFEST
    rebuild = f"rebuild with: {rebuild_command(directory, manifest)}"
    if not digest_holds(directory):
        raise ArtifactError(f"{path} is damaged or was edited: its content differs from its digest; {rebuild}")
    for name in REQUIRED_FILES[manifest.backend]:
        if name not in manifest.files:
            raise ArtifactError(f"{path} does not list {name}; {rebuild}")
    for name, entry in manifest.files.items():
        size = _size(directory / name, rebuild)
        if size != entry.size:
            raise ArtifactError(f"{directory / name} has {size} bytes, the manifest says {entry.size}; {rebuild}")
    return rebuild


class _Digests:
    """The digests of an engine's files, or the errors of reading them, in the manifest's order. Leaving the block ends
    the reading."""

    def __init__(self, directory: Path, manifest: Manifest, progress: Progress) -> None:
        self._directory = directory
        self._progress = progress
        self._names = list(manifest.files)
        self._total = sum(entry.size for entry in manifest.files.values())
        self._read = dict.fromkeys(self._names, 0)
        self._lock = threading.Lock()  # guards `_read` and calls of `progress`
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1), thread_name_prefix="ddtree-verify")

    def _digest(self, name: str) -> str | OSError:
        try:
            return sha256_file(self._directory / name, report=partial(self._report, name))
        except OSError as error:
            return error

    def _report(self, name: str, read: int) -> None:
        if self._stopped.is_set():
            raise InterruptedError
        with self._lock:
            self._read[name] = read
            self._progress("verify files", sum(self._read.values()), self._total)

    def __enter__(self) -> Iterator[str | OSError]:
        return self._pool.map(self._digest, self._names)

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)


def _size(path: Path, rebuild: str) -> int:
    if not path.is_file():
        raise ArtifactError(f"{path} is missing; {rebuild}")
    return path.stat().st_size


@dataclass(frozen=True)
class CheckedFile:
    """A file as it was when its digest was compared."""

    sha256: str
    stat: tuple[int, ...]  # device, inode, bytes, and nanoseconds of mtime and ctime


@dataclass(frozen=True)
class VerifiedFiles:
    """The content of a record."""

    version: int
    files: dict[str, CheckedFile]  # by name


def verify_for_opening(directory: Path, manifest: Manifest, progress: Progress = no_progress) -> None:
    """Check an engine's files as `verify_files` does, and without reading those that were checked before and have not
    changed since. With DDTREE_VERIFY=full in the environment all are read.

    Raises ArtifactError as `verify_files` does, UsageError for another value of DDTREE_VERIFY.
    """
    mode = os.environ.get(SWITCH) or "stat"
    if mode not in ("stat", "full"):
        raise UsageError(f"{SWITCH} must be stat or full, not {shown(mode)}")
    check_listed(directory, manifest)
    before = _checked(directory, manifest)
    path = directory / VERIFIED
    if mode == "stat" and before == _read(path):
        return
    started_ns = time.time_ns()
    verify_files(directory, manifest, progress)
    settled = all(max(file.stat[-2:]) < started_ns - _SETTLED_NS for file in before.values())
    if settled and before == _checked(directory, manifest):
        _write(path, before)


def _checked(directory: Path, manifest: Manifest) -> dict[str, CheckedFile]:
    return {name: CheckedFile(entry.sha256, _stat(directory / name)) for name, entry in manifest.files.items()}


def _stat(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read(path: Path) -> Mapping[str, CheckedFile]:
    """The files of a record; none where there is no record, or one that cannot be read."""
    if not os.path.lexists(path):
        return {}
    source = Source(str(path), ArtifactError, "the files are read again")
    try:
        record = read_record(VerifiedFiles, read_json(path, source), source)
    except ArtifactError as error:
        _log.debug("%s", error)
        return {}
    return record.files if record.version == _VERSION else {}


def _write(path: Path, files: Mapping[str, CheckedFile]) -> None:
    record = {"version": _VERSION, "files": {name: asdict(file) for name, file in files.items()}}
    try:
        write_atomically(path, json.dumps(record, indent=1) + "\n")
    except OSError as error:  # a read-only directory: its files are read at every opening
        _log.debug("%s cannot be written: %s", path, error.strerror)
