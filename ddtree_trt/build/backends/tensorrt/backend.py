"""The TensorRT part of a build: plans compiled on this machine's GPU."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_trt import plugins
from ddtree_trt.artifact.files import sha256_file
from ddtree_trt.artifact.manifest import AttentionName, Limits
from ddtree_trt.artifact.precisions import BACKEND_PRECISIONS, PRECISIONS, BackendName, PrecisionName
from ddtree_trt.artifact.progress import Progress
from ddtree_trt.artifact.toolchain import installed_versions
from ddtree_trt.build.backends.base import BuilderOptions, Written
from ddtree_trt.build.backends.tensorrt.machine import LOWEST_FP8_SM, Machine, check_layers, examine
from ddtree_trt.device.buffers import with_aligned_slots
from ddtree_trt.errors import UsageError
from ddtree_trt.models.decoder import TransformerDims

if TYPE_CHECKING:
    from ddtree_trt.build.checkpoint.reader import Checkpoint


class TensorRtBuild:
    """`BackendBuild` for NVIDIA GPUs. Plans run on the GPU model and the TensorRT version they were compiled with."""

    name: BackendName = "tensorrt"
    precisions: tuple[PrecisionName, ...] = tuple(p for p in BACKEND_PRECISIONS["tensorrt"] if PRECISIONS[p].half)

    def __init__(self, options: BuilderOptions) -> None:
        self._options = options

    @cached_property
    def machine(self) -> Machine:
        """This machine's versions and GPU. Raises MissingDependency or BuildError where it cannot build."""
        return examine(self._options.attention)

    def check(self, networks: Iterable[TransformerDims], precision: PrecisionName) -> None:
        check_layers(networks)

    def drafter_rows(self, block: int) -> int:
        return block

    def bytes_on_disk(self, target: Checkpoint, drafter: Checkpoint, precision: PrecisionName) -> int:
        return plans_on_disk(target, drafter, self._options.row_independence)

    def write(
        self,
        directory: Path,
        target: Checkpoint,
        drafter: Checkpoint,
        limits: Limits,
        precision: PrecisionName,
        progress: Progress,
    ) -> Written:
        machine = self.machine
        _check_fp8(target, machine)
        library, note = self._plugin_library(target, drafter)
        from ddtree_trt.build.backends.tensorrt.plan import EngineBuilder
        from ddtree_trt.build.backends.tensorrt.plans import EnginePlans

        # Outside of the directory that is built: later builds use it too.
        cache = directory.parent / f"tensorrt-{machine.tensorrt}-sm{machine.sm}.timing"
        title = f"TensorRT {machine.tensorrt}"
        builder = EngineBuilder(machine.trt, title, self._options, progress, plugin_library=library, timing_cache=cache)
        attention: AttentionName = "plugin" if library else "native"
        if attention == "native":
            limits = with_aligned_slots(limits, (target.dims, drafter.dims), PRECISIONS[precision].value_bytes)
        plans = EnginePlans(target, drafter, limits, precision, attention, self._options.row_independence)
        tensors = plans.write(directory, builder, progress)
        plugin = {**plugins.IDENTITY, "sha256": sha256_file(library)} if library else None
        return Written(tensors, self._toolchain(), plugin, (note,) if note else (), limits)

    def _toolchain(self) -> dict[str, str]:
        machine = self.machine
        return {
            "tensorrt": machine.tensorrt,
            "cuda": machine.cuda,
            "sm": str(machine.sm),
            "driver": machine.driver,
            "gpu": machine.gpu,
            "row_independence": "yes" if self._options.row_independence else "no",
            "python": platform.python_version(),
            **installed_versions("numpy", "onnx"),
        }

    def _plugin_library(self, target: Checkpoint, drafter: Checkpoint) -> tuple[Path | None, str]:
        """(The library whose plugin computes attention, or None where TensorRT's own layers do; where the user left it
        to the build, a line that says which.) Raises UsageError for heads that the plugin asked for cannot compute."""
        wanted, library, why = self._options.attention, self.machine.plugins, self.machine.no_plugins
        other = next((n.head_dim for n in (target.dims, drafter.dims) if n.head_dim not in plugins.HEAD_DIMS), None)
        if library and other is not None:
            sizes = " or ".join(map(str, plugins.HEAD_DIMS))
            why = f"heads of {other} values have no kernel, heads of {sizes} have"
            if wanted == "plugin":
                raise UsageError(f"{why}; use --attention native")
            library = None
        if wanted != "auto":
            return library, ""
        if library:
            return library, f"attention: our plugin, {library.name}"
        return None, f"attention: native, TensorRT's own layers; our plugin is left out: {why}"


def plans_on_disk(target: Checkpoint, drafter: Checkpoint, row_independence: bool) -> int:
    """About the bytes of an engine directory. While a network is compiled its weights are on disk twice: as the parser
    reads them, and in the plan, which has them once more for a second profile."""
    plans = 1 if row_independence else 2
    return (1 + plans) * target.stored_bytes(2) + plans * 2 * drafter.num_values


def _check_fp8(target: Checkpoint, machine: Machine) -> None:
    """Raises UsageError for a target quantised to FP8 on a GPU that does not multiply it."""
    quantization = target.quantization
    if quantization and quantization.format.values == "float8_e4m3fn" and machine.sm < LOWEST_FP8_SM:
        raise UsageError(
            f"{target.name} is quantised to FP8, which needs compute capability {LOWEST_FP8_SM / 10} or newer, and "
            f"{machine.gpu} has {machine.sm / 10}; use the checkpoint before quantisation"
        )
