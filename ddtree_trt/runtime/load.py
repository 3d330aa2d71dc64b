"""Opening an engine directory: manifest, digests, backend, tokenizer."""

from __future__ import annotations

from pathlib import Path

from ddtree_trt.artifact import Manifest, load_manifest, verify_files
from ddtree_trt.errors import ArtifactError
from ddtree_trt.runtime.engine import Engine


def open_engine(directory: Path, *, threads: int = 0) -> Engine:
    """Load the engine in `directory`, after checking schema and digests. Backends are imported only when needed.

    Raises ArtifactError with what differs and the command that rebuilds the engine.
    """
    manifest = load_manifest(directory)
    verify_files(directory, manifest)
    return _open_backend(directory, manifest, threads)


def _open_backend(directory: Path, manifest: Manifest, threads: int) -> Engine:
    if manifest.backend == "onnxruntime":
        from ddtree_trt.runtime.ort import OrtEngine

        return OrtEngine(directory, manifest, threads=threads)
    raise ArtifactError(
        f"{directory} was built for backend {manifest.backend!r}, which this version of ddtree-trt cannot run; "
        f"rebuild with: ddtree-trt build --target {manifest.name} --backend onnxruntime --force"
    )
