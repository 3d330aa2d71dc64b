"""What `compile.py` asks of a backend's half of the build: one small object per backend, chosen by one `if`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from ddtree_trt.artifact.manifest import Limits, Progress
from ddtree_trt.errors import MAX_COUNT, UsageError, check_range

if TYPE_CHECKING:
    from ddtree_trt.build.checkpoint.reader import Checkpoint

BackendName = Literal["onnxruntime", "torch", "tensorrt"]
PrecisionName = Literal["fp32", "fp16", "bf16", "int8"]


@dataclass(frozen=True)
class BuilderOptions:
    """How TensorRT's builder works, which no other backend has; None leaves a value to TensorRT."""

    optimization_level: int | None = None  # 0 to 5: how long it searches for fast kernels
    workspace_mib: int | None = None  # most scratch memory a layer may use
    inspect: bool = False  # keep layer details in the engine, and write them beside it as JSON

    def check(self, backend: BackendName) -> None:
        """Raises UsageError for values out of range, and for any value where `backend` has no use for it."""
        given = {
            "--builder-optimization-level": self.optimization_level,
            "--builder-workspace-mib": self.workspace_mib,
            "--builder-inspect": self.inspect or None,
        }
        for option, value in given.items():
            if value is not None and backend != "tensorrt":
                raise UsageError(f"{option} is for --backend tensorrt, not for {backend}; leave it out")
        if self.optimization_level is not None:
            check_range("--builder-optimization-level", self.optimization_level, 0, 5)
        if self.workspace_mib is not None:
            check_range("--builder-workspace-mib", self.workspace_mib, 1, MAX_COUNT)


@dataclass(frozen=True)
class Written:
    """What a backend put into the engine directory, for the manifest."""

    tensors: dict[str, dict[str, list[str]]]  # graph → inputs / outputs, in order
    plugin: dict[str, str] | None = None


class BackendBuild(Protocol):
    """A backend's half of the build. `backend_build` makes it before any work, and refuses the machine if need be."""

    name: BackendName
    precisions: tuple[PrecisionName, ...]  # the first is what `auto` means

    @property
    def toolchain(self) -> dict[str, str]:
        """Versions of what compiles the engine."""

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


def backend_build(
    name: Literal["auto", BackendName], options: BuilderOptions, *, dry_run: bool = False
) -> BackendBuild:
    """The named backend; `auto` is ONNX Runtime, which runs everywhere. For a dry run any machine will do.

    Raises MissingDependency where its packages are not installed, BuildError where this machine cannot build it, and
    UsageError for options it has no use for.
    """
    options.check("onnxruntime" if name == "auto" else name)
    if name in ("auto", "onnxruntime"):
        from ddtree_trt.build.backends.onnxruntime.backend import OnnxRuntimeBuild

        return OnnxRuntimeBuild()
    if name == "torch":
        from ddtree_trt.build.backends.torch.backend import TorchBuild

        return TorchBuild()
    from ddtree_trt.build.backends.tensorrt.backend import TensorRtBuild

    build = TensorRtBuild(options)
    if not dry_run:
        _ = build.machine  # refuses one that cannot build, before any work
    return build


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
