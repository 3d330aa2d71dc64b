"""The TensorRT for RTX part of a build: plans for the GPUs of workstations, compiled on any machine."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_trt.artifact.backends import TENSORRT_RTX
from ddtree_trt.artifact.manifest import AttentionName, Limits
from ddtree_trt.artifact.precisions import PrecisionName
from ddtree_trt.artifact.progress import Progress
from ddtree_trt.artifact.toolchain import installed_versions
from ddtree_trt.build.backends.base import BuilderOptions, Written
from ddtree_trt.build.backends.tensorrt.backend import plans_on_disk
from ddtree_trt.build.backends.tensorrt.gpus import kinds_here, named_kinds
from ddtree_trt.build.backends.tensorrt.machine import check_layers, check_release, check_values, sm_for_values
from ddtree_trt.device.gpus import find_gpus
from ddtree_trt.device.rtx_kinds import KINDS
from ddtree_trt.device.tensorrt_library import import_tensorrt
from ddtree_trt.models.decoder import TransformerDims

if TYPE_CHECKING:
    from ddtree_trt.build.checkpoint.reader import Checkpoint


class RtxBuild:
    """`BackendBuild` for GeForce, RTX PRO and DGX Spark.

    The engine is for the GPUs that the user names, else for this machine's, else, where it has none, for every kind
    that can run it: a plan for all of them is hardly larger than one for a single kind.
    """

    backend = TENSORRT_RTX
    precisions = TENSORRT_RTX.builds  # every kind of GPU that is served has both

    def __init__(self, options: BuilderOptions) -> None:
        """Raises UsageError or BuildError for GPUs that TensorRT for RTX does not serve."""
        self._kinds = named_kinds(options.gpus) or kinds_here(find_gpus())

    @cached_property
    def module(self) -> Any:
        """The product's Python module. Raises MissingDependency where it cannot be used."""
        trt = import_tensorrt(rtx=True)
        check_release(self.backend, trt.__version__)
        return trt

    def check_machine(self) -> None:
        _ = self.module

    def check(self, networks: Iterable[TransformerDims], precision: PrecisionName) -> None:
        check_layers(networks, self.backend)

    def attention(self, networks: Iterable[TransformerDims]) -> AttentionName:
        return "native"

    def bytes_on_disk(self, target: Checkpoint, drafter: Checkpoint, precision: PrecisionName) -> int:
        return plans_on_disk(target, drafter)

    def write(
        self,
        directory: Path,
        target: Checkpoint,
        drafter: Checkpoint,
        limits: Limits,
        precision: PrecisionName,
        progress: Progress,
    ) -> Written:
        kinds = self._kinds_for(target)
        from ddtree_trt.build.backends.tensorrt.plan import EngineBuilder
        from ddtree_trt.build.backends.tensorrt.plans import EnginePlans

        version = self.module.__version__
        builder = EngineBuilder(self.module, f"{self.backend.title} {version}", progress, gpus=kinds)
        plans = EnginePlans(target, drafter, limits, precision, "native")
        tensors = plans.write(directory, builder, progress)
        toolchain = {
            TENSORRT_RTX.name: version,
            "gpus": " ".join(kinds),
            "python": platform.python_version(),
            **installed_versions("numpy", "onnx"),
        }
        return Written(tensors, toolchain)

    def _kinds_for(self, target: Checkpoint) -> tuple[str, ...]:
        """The kinds of GPU that the engine is for. Raises UsageError where one cannot compute what the target needs."""
        for kind in self._kinds:
            check_values(target, kind, KINDS[kind])
        lowest = sm_for_values(target.quantization)
        return self._kinds or tuple(kind for kind, sm in KINDS.items() if sm >= lowest)
