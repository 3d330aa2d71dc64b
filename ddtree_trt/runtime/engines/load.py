"""Opening an engine directory: manifest, digests, backend."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddtree_trt.artifact import backends
from ddtree_trt.artifact.backends import BACKENDS, Backend
from ddtree_trt.artifact.manifest import Limits, Manifest, load_manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.artifact.verify import rebuild_command, verify_for_opening
from ddtree_trt.device.cpu import usable_cores
from ddtree_trt.device.memory import plan_manifest
from ddtree_trt.errors import ArtifactError, MissingDependency, UsageError, install_with
from ddtree_trt.records import misplaced_option, with_fields
from ddtree_trt.runtime.engines.base import Engine
from ddtree_trt.runtime.engines.passes import closed_on_failure
from ddtree_trt.runtime.options import DEFAULTS, EngineOptions

# "not enough memory: you tried to allocate", "CUDA out of memory", "bad_alloc", CUBLAS_STATUS_ALLOC_FAILED
_NO_MEMORY = re.compile(r"allocate\b|bad.alloc|alloc_failed|out of memory", re.IGNORECASE)


def open_engine(
    directory: Path,
    options: EngineOptions | None = None,
    *,
    warm: bool = False,
    limits: Limits | None = None,
    progress: Progress = no_progress,
    **fields: Any,
) -> Engine:
    """Load the engine in `directory`, after checking schema and digests. Only its backend is imported.

    `fields` are options over those in `options`. `warm`: call `Engine.warm_up`, which reports to `progress`. `limits`:
    other ones than it was built for, whose caches have as many rows; no plans depend on them. Raises UsageError for an
    option that is out of range or not one of this engine, and ArtifactError, which names the difference and the command
    that rebuilds the engine, for an engine that cannot be loaded.
    """
    options = with_fields(EngineOptions, options, fields)
    if options.threads > 4 * (cores := usable_cores()):
        raise UsageError(f"threads {options.threads} would wait for each other on {cores} cores; give at most {cores}")
    manifest = load_manifest(directory)
    if misplaced := misplaced_option(EngineOptions, options, manifest.backend):
        flag, served = misplaced
        raise UsageError(
            f"{flag[2:].replace('-', '_')} is for engines of the {served} backend, {directory} is for "
            f"{manifest.backend}; leave it out, or build the engine again with --backend {served}"
        )
    verify_for_opening(directory, manifest, progress)
    if limits is not None:
        manifest = replace(manifest, limits=limits)
    try:
        engine = load_backend(directory, manifest, options)
        if warm:
            with closed_on_failure(engine):
                engine.warm_up(progress)
        return engine
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _NO_MEMORY.search(str(error)):
            raise
        needed, reason = plan_manifest(manifest).total_bytes, str(error).partition("\n")[0]
        raise ArtifactError(
            f"{directory} needs about {needed / 1e9:.1f} GB of memory and did not get it ({reason}); rebuild with a "
            f"smaller --max-batch or --max-seq-len: {rebuild_command(directory, manifest)}"
        ) from error


def load_backend(directory: Path, manifest: Manifest, options: EngineOptions = DEFAULTS) -> Engine:
    """The engine of a directory whose digests were checked, as a manifest describes it."""
    backend = BACKENDS[manifest.backend]
    require(backend, f"{directory} was built for the {backend.name} backend")
    engine: Engine = backends.load(backend.engine)(directory, manifest, options)
    return engine


def require(backend: Backend, why: str) -> None:
    """Raises MissingDependency, whose text begins with `why`, where the backend's library is not installed. Engines
    that are plans say it themselves, with the release they need."""
    if not backend.plans and any(importlib.util.find_spec(module) is None for module in backend.modules):
        raise MissingDependency(f"{why} and {backend.title} is not installed; {install_with(backend.extra)}")
