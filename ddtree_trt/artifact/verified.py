"""The record that an engine's files were checked, which spares later openings reading them all.

A file is taken for the one that was checked while device, inode, size, and the times of its last change in nanoseconds
are as they were, and the manifest names the same digest. Whatever rewrites a file moves its ctime, which no program can
set; a copy has another inode. What a record cannot show are bits that decay on a disk, and writes on another machine
that a network file system has not reported yet: reading all files again finds these.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ddtree_trt.artifact.files import VERIFIED
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.artifact.verify import check_listed, verify_files
from ddtree_trt.errors import ArtifactError, UsageError, shown
from ddtree_trt.files import write_atomically
from ddtree_trt.reading import Source, read_json, read_record

SWITCH = "DDTREE_VERIFY"  # environment: "stat", the default, or "full"
_VERSION = 1
# A file written in the moment it was checked could be written once more without another time: it is not recorded.
_SETTLED_NS = 2_000_000_000

_log = logging.getLogger(__name__)


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
