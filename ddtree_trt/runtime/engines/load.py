"""Opening an engine directory: manifest, digests, backend, tokenizer."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ddtree_trt.artifact.manifest import Limits, Manifest, load_manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.artifact.rebuild import rebuild_command
from ddtree_trt.artifact.toolchain import always_causal, installed_versions
from ddtree_trt.artifact.verify import verify_for_opening
from ddtree_trt.device.memory import plan_manifest
from ddtree_trt.errors import (
    MAX_THREADS,
    ArtifactError,
    MissingDependency,
    UsageError,
    check_range,
    check_ranks,
    install_with,
)
from ddtree_trt.runtime.engines.base import Engine

# "not enough memory: you tried to allocate", "CUDA out of memory", "bad_alloc", CUBLAS_STATUS_ALLOC_FAILED
_NO_MEMORY = re.compile(r"allocate\b|bad.alloc|alloc_failed|out of memory", re.IGNORECASE)


def open_engine(
    directory: Path,
    *,
    threads: int = 0,
    warm: bool = False,
    exact: bool | None = None,
    tensor_parallel_size: int = 1,
    limits: Limits | None = None,
    progress: Progress = no_progress,
) -> Engine:
    """Load the engine in `directory`, after checking schema and digests: those of files that were checked before and
    have not changed since are not computed again. Only its backend is imported.

    `threads`: CPU threads; 0 chooses automatically. `warm`: call `Engine.warm_up`, which reports to `progress`.
    `exact`: whether every method emits the tokens of autoregressive decoding, bit for bit; None is the engine's
    default. `tensor_parallel_size`: processes over which the target of an engine of the torch backend is split, each
    with a GPU where there are GPUs. `limits`: other ones than it was built for, whose caches have as many rows; no
    plans depend on them. Raises UsageError for a number out of range or where `exact` or the number of processes
    cannot be chosen, and ArtifactError, which names the difference and the command that rebuilds the engine, for an
    engine that cannot be loaded.
    """
    check_range("threads", threads, 0, MAX_THREADS)
    check_ranks(tensor_parallel_size)
    manifest = load_manifest(directory)
    if exact is not None and manifest.backend != "onnxruntime":
        raise UsageError(
            f"exact can be chosen for engines of the onnxruntime backend, {directory} is for {manifest.backend}; "
            "leave it out"
        )
    if exact and manifest.target_dims.experts:
        raise UsageError(
            f"{directory} has a mixture of experts, whose products depend on how many rows of a pass choose an expert; "
            "leave exact out"
        )
    if tensor_parallel_size > 1 and manifest.backend != "torch":
        raise UsageError(
            f"tensor_parallel_size is for engines of the torch backend, {directory} is for {manifest.backend}; leave "
            f"it out, or rebuild with: {rebuild_command(directory, replace(manifest, backend='torch'))}"
        )
    verify_for_opening(directory, manifest, progress)
    if limits is not None:
        manifest = replace(manifest, limits=limits)
    try:
        with _as_memory_errors():
            engine = load_backend(directory, manifest, threads, exact, tensor_parallel_size)
            if warm:
                with closed_on_failure(engine):
                    engine.warm_up(progress)
            return engine
    except MemoryError as error:
        needed = plan_manifest(manifest).total_bytes
        raise ArtifactError(
            f"{directory} needs about {needed / 1e9:.1f} GB of memory and did not get it ({error}); rebuild with a "
            f"smaller --max-batch or --max-seq-len: {rebuild_command(directory, manifest)}"
        ) from error


@contextmanager
def _as_memory_errors() -> Iterator[None]:
    """Raise the backends' out-of-memory errors as MemoryError with a one-line text."""
    try:
        yield
    except RuntimeError as error:
        # PyTorch's class for GPUs is recognised by its name, because torch may not be installed. The errors of CPUs and
        # of other libraries can be recognised by their texts only.
        text = str(error)
        if type(error).__name__ != "OutOfMemoryError" and not _NO_MEMORY.search(text):
            raise
        raise MemoryError(text.partition("\n")[0]) from error


@contextmanager
def closed_on_failure(engine: Engine) -> Iterator[None]:
    """Close the engine where the block raises, since no object then owns it."""
    try:
        yield
    except BaseException:
        engine.close()
        raise


def load_backend(
    directory: Path, manifest: Manifest, threads: int, exact: bool | None, tensor_parallel_size: int = 1
) -> Engine:
    """The engine of a directory whose digests were checked, as a manifest describes it."""
    if manifest.backend == "onnxruntime":
        _check_onnxruntime(directory, manifest)
        from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine

        return OrtEngine(directory, manifest, threads=threads, exact=exact)
    if manifest.backend == "torch":
        require_torch(f"{directory} was built for the torch backend")
        if tensor_parallel_size > 1:
            from ddtree_trt.runtime.engines.torch.parallel.engine import ParallelEngine

            return ParallelEngine.open(directory, manifest, tensor_parallel_size, threads=threads)
        from ddtree_trt.runtime.engines.torch.engine import TorchEngine

        return TorchEngine.open(directory, manifest, threads=threads)
    from ddtree_trt.runtime.engines.tensorrt.engine import TrtEngine

    return TrtEngine.open(directory, manifest)


def require_torch(why: str) -> None:
    """Raises MissingDependency, whose text begins with `why`, where PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(f"{why} and PyTorch is not installed; {install_with('torch')}")


def _check_onnxruntime(directory: Path, manifest: Manifest) -> None:
    """Raises ArtifactError when the drafter needs an attention kernel newer than the installed one."""
    installed = installed_versions("onnxruntime")
    if manifest.drafting.drafts != "block" or always_causal(manifest.toolchain) or not installed:
        return
    if always_causal(installed):
        raise ArtifactError(
            f"{directory} was built for the attention kernel of onnxruntime {manifest.toolchain['onnxruntime']}, "
            f"found the older {installed['onnxruntime']}; rebuild with: {rebuild_command(directory, manifest)}"
        )
