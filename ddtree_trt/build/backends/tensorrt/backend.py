"""The TensorRT part of a build: plans compiled on this machine's GPU."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_trt import plugins
from ddtree_trt.artifact.backends import TENSORRT
from ddtree_trt.artifact.files import sha256_file
from ddtree_trt.artifact.manifest import AttentionName, Limits
from ddtree_trt.artifact.precisions import PrecisionName
from ddtree_trt.artifact.progress import Progress
from ddtree_trt.artifact.toolchain import installed_versions
from ddtree_trt.build.backends.base import BuilderOptions, Written
from ddtree_trt.build.backends.tensorrt.machine import Machine, check_layers, check_values, examine
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.errors import MissingDependency, UsageError
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.plugins import library

if TYPE_CHECKING:
    from ddtree_trt.build.checkpoint.reader import Checkpoint


class TensorRtBuild:
    """`BackendBuild` for NVIDIA GPUs. Plans run on the GPU model and the TensorRT version they were compiled with."""

    backend = TENSORRT
    precisions = TENSORRT.builds

    def __init__(self, options: BuilderOptions) -> None:
        self._options = options

    @cached_property
    def machine(self) -> Machine:
        """This machine's versions and GPU. Raises MissingDependency or BuildError where it cannot build."""
        return examine(self._options.attention)

    def check_machine(self) -> None:
        _ = self.machine

    def check(self, networks: Iterable[TransformerDims], precision: PrecisionName) -> None:
        networks = tuple(networks)
        check_layers(networks, self.backend)
        if self._options.attention == "plugin" and (why := _beyond_plugin(networks)):
            raise UsageError(f"{why}; use --attention native")

    def attention(self, networks: Iterable[TransformerDims]) -> AttentionName:
        wanted = self._options.attention
        if wanted != "auto":
            return wanted
        return "native" if _why_native(networks) else "plugin"

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
        machine = self.machine
        check_values(target, machine.gpu, machine.sm)
        networks = (target.dims, drafter.dims)
        attention = self.attention(networks)
        plugin_library = library.find(library.PLUGINS) if attention == "plugin" else None
        from ddtree_trt.build.backends.tensorrt.plan import EngineBuilder
        from ddtree_trt.build.backends.tensorrt.plans import EnginePlans

        # Outside of the directory that is built: later builds use it too.
        cache = directory.parent / f"tensorrt-{machine.tensorrt}-sm{machine.sm}.timing"
        title = f"{TENSORRT.title} {machine.tensorrt}"
        builder = EngineBuilder(machine.trt, title, progress, plugin_library=plugin_library, timing_cache=cache)
        plans = EnginePlans(target, drafter, limits, precision, attention)
        tensors = plans.write(directory, builder, progress)
        plugin = {**plugins.IDENTITY, "sha256": sha256_file(plugin_library)} if plugin_library else None
        notes = (_note(networks),) if self._options.attention == "auto" else ()
        return Written(tensors, self._toolchain(), plugin, notes)

    def _toolchain(self) -> dict[str, str]:
        machine = self.machine
        return {
            TENSORRT.name: machine.tensorrt,
            "cuda": machine.cuda,
            "sm": str(machine.sm),
            "driver": machine.driver,
            "gpu": machine.gpu,
            "python": platform.python_version(),
            **installed_versions("numpy", "onnx"),
        }


def _beyond_plugin(networks: Iterable[TransformerDims]) -> str:
    """Words on a network whose attention our plugin has no kernel for; "" where there is none."""
    networks = tuple(networks)
    if any(kind_of(n).windowed for n in networks):
        return "the drafter's sliding windows have no kernel"
    other = next((n.head_dim for n in networks if n.head_dim not in plugins.HEAD_DIMS), None)
    sizes = " or ".join(map(str, plugins.HEAD_DIMS))
    return "" if other is None else f"heads of {other} values have no kernel, heads of {sizes} have"


def _why_native(networks: Iterable[TransformerDims]) -> str:
    """Why our plugin cannot compute the attention of these networks; "" where it can."""
    try:
        library.find(library.PLUGINS)
    except MissingDependency as error:
        return str(error)
    return _beyond_plugin(networks)


def _note(networks: Iterable[TransformerDims]) -> str:
    """What computes attention where the user left it to the build."""
    why = _why_native(networks)
    if why:
        return f"attention: native, TensorRT's own layers; our plugin is left out: {why}"
    return f"attention: our plugin, {library.PLUGINS}"


def plans_on_disk(target: Checkpoint, drafter: Checkpoint) -> int:
    """About the bytes of an engine directory. While a network is compiled its weights are on disk twice: as the parser
    reads them, and in the plan."""
    return 2 * target.stored_bytes(2) + 2 * drafter.num_values
