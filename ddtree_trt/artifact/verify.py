"""Check that an engine's files are those that were built.

The digests of a large engine take ten seconds and more, too long for every opening, so what was checked is recorded. A
file is taken for the one that was
checked while device, inode, size and both times are as they were and the manifest names the same digest: whatever
rewrites a file moves its ctime, which no program can set, and a copy has another inode. Bits that decay on a disk are
found by `verify_files`, which `ddtree-trt inspect` calls.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.files import MANIFEST, TOKENIZER_FILES, VERIFIED, sha256_file
from ddtree_trt.artifact.manifest import Manifest, digest_holds
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.artifact.rebuild import rebuild_command
from ddtree_trt.errors import ArtifactError
from ddtree_trt.files import write_atomically

# A file written in the moment it was checked could be written once more without another time: it is not recorded.
_SETTLED_NS = 2_000_000_000

_log = logging.getLogger(__name__)


def verify_files(directory: Path, manifest: Manifest, progress: Progress = no_progress) -> None:
    """Check the manifest's own digest, then size and digest of every file of the engine, before any is opened.

    Raises ArtifactError that names the file and the command that rebuilds the engine.
    """
    rebuild = _check_listed(directory, manifest)
    total, done = sum(entry.size for entry in manifest.files.values()), 0
    for name, entry in manifest.files.items():
        path = directory / name

        def report(read: int, done: int = done) -> None:
            progress("verify files", done + read, total)

        try:
            digest = sha256_file(path, report=report)
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read ({error.strerror}); {rebuild}") from error
        if digest != entry.sha256:
            raise ArtifactError(f"{path} is damaged: its sha256 differs from the manifest's; {rebuild}")
        done += entry.size


def verify_for_opening(directory: Path, manifest: Manifest, progress: Progress = no_progress) -> None:
    """`verify_files`, which reads nothing where the files were checked before and have not changed since."""
    _check_listed(directory, manifest)
    record, files = directory / VERIFIED, _identities(directory, manifest)
    if _read(record) == files:
        return
    started_ns = time.time_ns()
    verify_files(directory, manifest, progress)
    settled = all(max(times) < started_ns - _SETTLED_NS for _, _, _, _, *times in files.values())
    if settled and files == _identities(directory, manifest):
        try:
            write_atomically(record, json.dumps(files, indent=1) + "\n")
        except OSError as error:  # a read-only directory: its files are read at every opening
            _log.debug("%s cannot be written: %s", record, error.strerror)


def _check_listed(directory: Path, manifest: Manifest) -> str:
    """Check the manifest's own digest, and that the engine's files are listed, exist and have their sizes; returns the
    advice for errors about them. Raises ArtifactError."""
    path = directory / MANIFEST
    rebuild = f"rebuild with: {rebuild_command(directory, manifest)}"
    if not digest_holds(directory):
        raise ArtifactError(f"{path} is damaged or was edited: its content differs from its digest; {rebuild}")
    for name in (*BACKENDS[manifest.backend].files, *TOKENIZER_FILES):
        if name not in manifest.files:
            raise ArtifactError(f"{path} does not list {name}; {rebuild}")
    for name, entry in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise ArtifactError(f"{path} is missing; {rebuild}")
        if (size := path.stat().st_size) != entry.size:
            raise ArtifactError(f"{path} has {size} bytes, the manifest says {entry.size}; {rebuild}")
    return rebuild


def _identities(directory: Path, manifest: Manifest) -> dict[str, list[Any]]:
    """Per file its digest, device, inode, bytes, and nanoseconds of mtime and ctime."""
    found = {name: ((directory / name).stat(), entry.sha256) for name, entry in manifest.files.items()}
    return {
        name: [sha256, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns]
        for name, (s, sha256) in found.items()
    }


def _read(record: Path) -> Any:
    try:
        return json.loads(record.read_bytes())
    except (OSError, ValueError, RecursionError):  # no record, or none of ours
        return None
