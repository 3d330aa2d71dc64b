"""Check that an engine's files are those that were built."""

from __future__ import annotations

from pathlib import Path

from ddtree_trt.artifact.files import COMPACTION_PLAN, MANIFEST, REQUIRED_FILES, sha256_file
from ddtree_trt.artifact.manifest import Manifest, digest_holds
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.artifact.rebuild import rebuild_command
from ddtree_trt.errors import ArtifactError


def verify_files(directory: Path, manifest: Manifest, progress: Progress = no_progress) -> None:
    """Check the manifest's own digest, then size and digest of every file of the engine, before any is opened.

    Raises ArtifactError that names the file and the command that rebuilds the engine.
    """
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
    done, total = 0, sum(entry.size for entry in manifest.files.values())
    for name, entry in manifest.files.items():
        start = done

        def report(read: int, start: int = start) -> None:
            progress("verify files", start + read, total)

        try:
            digest = sha256_file(directory / name, report=report)
        except OSError as error:
            raise ArtifactError(f"{directory / name} cannot be read ({error.strerror}); {rebuild}") from error
        if digest != entry.sha256:
            raise ArtifactError(f"{directory / name} is damaged: its sha256 differs from the manifest's; {rebuild}")
        done += entry.size


def _size(path: Path, rebuild: str) -> int:
    if not path.is_file():
        raise ArtifactError(f"{path} is missing; {rebuild}")
    return path.stat().st_size
