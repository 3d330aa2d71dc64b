"""Interface of a backend's part of a build, called by `compile.py`. `registry.py` has the backends by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from ddtree_trt.artifact.manifest import AttentionName, Limits
from ddtree_trt.artifact.precisions import BackendName, PrecisionName
from ddtree_trt.artifact.progress import Progress
from ddtree_trt.errors import MAX_COUNT, UsageError, check_range
from ddtree_trt.models.decoder import TransformerDims

if TYPE_CHECKING:
    from ddtree_trt.build.checkpoint.reader import Checkpoint


Attention = Literal["auto", "plugin", "native"]


@dataclass(frozen=True)
class BuilderOptions:
    """Options of the builders of TensorRT and TensorRT for RTX; no other backend has any. None leaves a value to
    TensorRT."""

    optimization_level: int | None = None  # 0 to 5: how long it searches for fast kernels
    workspace_mib: int | None = None  # most scratch memory a layer may use
    inspect: bool = False  # keep layer details in the engine, and write them beside it as JSON
    attention: Attention = "auto"  # what computes it; `auto` is our plugin where it is built
    gpus: tuple[str, ...] = ()  # kinds of GPU that TensorRT for RTX compiles for, as in sm89; none: this machine's
    row_independence: bool = True  # a row's result is the same bits wherever it stands in a batch

    def check(self, backend: BackendName) -> None:
        """Raises UsageError for values out of range, and for a value that `backend` has no use for."""
        plans: tuple[BackendName, ...] = ("tensorrt", "tensorrt-rtx")
        given: tuple[tuple[str, bool, tuple[BackendName, ...]], ...] = (
            ("--builder-optimization-level", self.optimization_level is not None, plans[:1]),
            ("--builder-workspace-mib", self.workspace_mib is not None, plans[:1]),
            ("--builder-inspect", self.inspect, plans[:1]),
            ("--attention", self.attention != "auto", plans[:1]),
            ("--gpu", bool(self.gpus), plans[1:]),
            ("--no-row-independence", not self.row_independence, plans),
        )
        for option, is_given, backends in given:
            if is_given and backend not in backends:
                served = " or ".join(backends)
                raise UsageError(f"{option} is for --backend {served}, not for {backend}; leave it out")
        if self.optimization_level is not None:
            check_range("--builder-optimization-level", self.optimization_level, 0, 5)
        if self.workspace_mib is not None:
            check_range("--builder-workspace-mib", self.workspace_mib, 1, MAX_COUNT)


@dataclass(frozen=True)
class Written:
    """The manifest's fields that a backend fills when it has written its files."""

    tensors: dict[str, dict[str, list[str]]]  # graph → inputs / outputs, in order
    toolchain: dict[str, str]
    plugin: dict[str, str] | None = None
    notes: tuple[str, ...] = ()  # lines for the user


class BackendBuild(Protocol):
    """A backend's part of a build, made by `registry.backend_build`."""

    name: BackendName
    precisions: tuple[PrecisionName, ...]  # the first is what `auto` means

    def check(self, networks: Iterable[TransformerDims], precision: PrecisionName) -> None:
        """Raises UsageError for networks that it does not compute in that precision, before any work."""

    def attention(self, networks: Iterable[TransformerDims]) -> AttentionName | None:
        """What computes the attention of their plans; None for a backend without plans."""

    def bytes_on_disk(self, target: Checkpoint, drafter: Checkpoint, precision: PrecisionName) -> int:
        """About the bytes of the engine directory."""

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
