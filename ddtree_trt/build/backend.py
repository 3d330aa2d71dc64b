"""What `compile.py` asks of a backend's half of the build: one small object per backend, chosen by one `if`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from ddtree_trt.artifact import Limits, Progress
from ddtree_trt.errors import UsageError

if TYPE_CHECKING:
    from ddtree_trt.build.checkpoint import Checkpoint

BackendName = Literal["onnxruntime", "torch", "tensorrt"]
PrecisionName = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True)
class Written:
    """What a backend put into the engine directory, for the manifest."""

    tensors: dict[str, dict[str, list[str]]]  # graph → inputs / outputs, in order
    plugin: dict[str, str] | None = None


class BackendBuild(Protocol):
    """A backend's half of the build. Made before any work, so that its constructor can refuse the machine."""

    name: BackendName
    precisions: tuple[PrecisionName, ...]  # the first is what `auto` means
    toolchain: dict[str, str]  # versions of what compiles the engine

    def drafter_rows(self, block: int) -> int:
        """Cache rows that a block drafter's block of `block` tokens takes."""

    def bytes_on_disk(self, target: Checkpoint, drafter: Checkpoint, precision: PrecisionName) -> int:
        """About what the engine directory takes."""

    def write(
        self,
        directory: Path,
        target: Checkpoint,
        drafter: Checkpoint,
        limits: Limits,
        precision: PrecisionName,
        progress: Progress,
    ) -> Written:
        """Write the backend's files into `directory`. Raises BuildError, or OSError when the disk is full."""


def backend_build(name: Literal["auto", BackendName]) -> BackendBuild:
    """The named backend; `auto` is ONNX Runtime, which runs everywhere.

    Raises MissingDependency where its packages are not installed, and UsageError where it cannot be built.
    """
    if name in ("auto", "onnxruntime"):
        from ddtree_trt.build.onnxruntime import OnnxRuntimeBuild

        return OnnxRuntimeBuild()
    raise UsageError(f"backend {name!r} cannot be built by this version; use --backend onnxruntime")


def resolve_precision(backend: BackendBuild, wanted: Literal["auto", PrecisionName]) -> PrecisionName:
    """The precision to compute in. Raises UsageError when the backend has no such one."""
    if wanted == "auto":
        return backend.precisions[0]
    if wanted not in backend.precisions:
        known = ", ".join(backend.precisions)
        raise UsageError(
            f"precision {wanted!r} is not available: the {backend.name} backend computes in {known}; "
            f"use --precision {backend.precisions[0]}"
        )
    return wanted
