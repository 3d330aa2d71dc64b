"""Check that an engine's files are those that were built."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ddtree_trt.artifact.files import COMPACTION_PLAN, MANIFEST, REQUIRED_FILES, sha256_file
from ddtree_trt.artifact.manifest import Manifest, digest_holds
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.artifact.rebuild import rebuild_command
from ddtree_trt.errors import ArtifactError

_READERS = 4  # files read at a time


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
    required = REQUIRED_FILES[manifest.backend] + ((COMPACTION_PLAN,) if manifest.attention == "native" else ())
    for name in required:
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
