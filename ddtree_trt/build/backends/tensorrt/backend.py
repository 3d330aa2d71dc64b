"""The parts of a build for TensorRT, whose plans are compiled on this machine's GPU, and for TensorRT for RTX, whose
plans are for the GPUs of workstations and compiled on any machine."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ddtree_trt import plugins
from ddtree_trt.artifact.backends import BACKENDS, ONNXRUNTIME, TENSORRT, TENSORRT_RTX, TORCH, Backend
from ddtree_trt.artifact.files import sha256_file
from ddtree_trt.artifact.manifest import AttentionName, Manifest
from ddtree_trt.artifact.precisions import PrecisionName
from ddtree_trt.artifact.progress import Progress
from ddtree_trt.artifact.toolchain import installed_versions
from ddtree_trt.build.backends.base import Attention, BackendBuild, BuilderOptions, Inputs, Written, lacking
from ddtree_trt.device.gpus import KINDS, UNSERVED, find_gpus
from ddtree_trt.device.libraries import (
    CudaVersions,
    CurrentGpu,
    cuda_bindings,
    cuda_versions,
    current_gpu,
    import_tensorrt,
)
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.errors import BuildError, EngineError, MissingDependency, UsageError, install_with, shown
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.plugins import LOWEST_SM, library

if TYPE_CHECKING:
    from ddtree_trt.build.checkpoint.quantization import Quantization
    from ddtree_trt.build.checkpoint.reader import Checkpoint

LOWEST_FP8_SM = 89  # the first GPUs that multiply FP8


class PlansBuild(BackendBuild):
    def check(self, networks: Iterable[TransformerDims], precision: PrecisionName) -> None:
        networks = tuple(networks)
        if what := lacking(self.backend, networks):
            others = " or ".join(b.name for b in (TORCH, ONNXRUNTIME) if not lacking(b, networks))
            raise UsageError(f"{what} are not implemented for {TENSORRT.title}; use --backend {others}")


class TensorRtBuild(PlansBuild):
    """For NVIDIA GPUs. Plans run on the GPU model and the TensorRT version they were compiled with."""

    backend = TENSORRT

    @cached_property
    def machine(self) -> Machine:
        return examine(self.options.attention)

    def check_machine(self) -> None:
        _ = self.machine

    def check(self, networks: Iterable[TransformerDims], precision: PrecisionName) -> None:
        networks = tuple(networks)
        super().check(networks, precision)
        if self.options.attention == "plugin" and (why := _beyond_plugin(networks)):
            raise UsageError(f"{why}; use --attention native")

    def attention(self, networks: Iterable[TransformerDims]) -> AttentionName:
        if self.options.attention != "auto":
            return self.options.attention
        return "native" if _why_native(networks) else "plugin"

    def write(self, directory: Path, inputs: Inputs, progress: Progress) -> Written:
        from ddtree_trt.build.backends.tensorrt.plans import EngineBuilder, write_engine

        (trt, gpu, cuda), attention = self.machine, self.attention(inputs.networks)
        check_values(inputs.target, gpu.name, gpu.sm)
        plugin_library = library.find(library.PLUGINS) if attention == "plugin" else None
        builder = EngineBuilder(trt, f"{TENSORRT.title} {trt.__version__}", progress, plugin_library=plugin_library)
        tensors = write_engine(directory, inputs, attention, builder, progress)
        toolchain = {
            TENSORRT.name: str(trt.__version__),
            "cuda": cuda.runtime,
            "sm": str(gpu.sm),
            "driver": cuda.driver,
            "gpu": gpu.name,
            "python": platform.python_version(),
            **installed_versions("numpy", "onnx"),
        }
        plugin = {**plugins.IDENTITY, "sha256": sha256_file(plugin_library)} if plugin_library else None
        notes: tuple[str, ...] = ()
        if self.options.attention == "auto":
            why = _why_native(inputs.networks)
            native = f"native, TensorRT's own layers; our plugin is left out: {why}"
            notes = (f"attention: {native if why else f'our plugin, {library.PLUGINS}'}",)
        return Written(tensors, toolchain, plugin, notes)


class RtxBuild(PlansBuild):
    """For GeForce, RTX PRO and DGX Spark.

    The engine is for the GPUs that the user names, else for every kind that can run it: a plan for all of them is
    hardly larger than one for a single kind.
    """

    backend = TENSORRT_RTX

    def __init__(self, options: BuilderOptions) -> None:
        """Raises UsageError for GPUs that TensorRT for RTX does not serve."""
        super().__init__(options)
        for name in options.gpus:
            if name not in KINDS:
                known = f"must be one of {', '.join(KINDS)}, not {shown(name)}"
                raise UsageError(f"--gpu {name} {UNSERVED[name]}" if name in UNSERVED else f"--gpu {known}")

    @cached_property
    def module(self) -> Any:
        """The product's Python module. Raises MissingDependency where it cannot be used."""
        trt = import_tensorrt(rtx=True)
        check_release(self.backend, trt.__version__)
        return trt

    def check_machine(self) -> None:
        _ = self.module

    def attention(self, networks: Iterable[TransformerDims]) -> AttentionName:
        return "native"

    def write(self, directory: Path, inputs: Inputs, progress: Progress) -> Written:
        from ddtree_trt.build.backends.tensorrt.plans import EngineBuilder, write_engine

        kinds, title = self.kinds_for(inputs.target), f"{TENSORRT_RTX.title} {self.module.__version__}"
        builder = EngineBuilder(self.module, title, progress, gpus=kinds)
        tensors = write_engine(directory, inputs, "native", builder, progress)
        toolchain = {
            TENSORRT_RTX.name: self.module.__version__,
            "gpus": " ".join(kinds),
            "python": platform.python_version(),
            **installed_versions("numpy", "onnx"),
        }
        return Written(tensors, toolchain)

    def kinds_for(self, target: Checkpoint) -> tuple[str, ...]:
        """The kinds of GPU that the engine is for. Raises UsageError where one cannot compute what the target needs."""
        kinds = tuple(dict.fromkeys(self.options.gpus))
        for kind in kinds:
            check_values(target, kind, KINDS[kind])
        lowest = sm_for_values(target.quantization)
        return kinds or tuple(kind for kind, sm in KINDS.items() if sm >= lowest)


class Machine(NamedTuple):
    """A machine that can build: TensorRT's module, and what CUDA says."""

    trt: Any
    gpu: CurrentGpu
    cuda: CudaVersions


def examine(attention: Attention) -> Machine:
    """This machine, which can build engines with that attention. Raises MissingDependency for what can be installed,
    BuildError for the rest."""
    trt = import_tensorrt()
    check_release(TENSORRT, trt.__version__)
    cuda = cuda_bindings()
    try:
        gpu, versions = current_gpu(cuda), cuda_versions(cuda)
    except EngineError as error:
        raise BuildError(f"{error}; is the NVIDIA driver installed and new enough?") from error
    if gpu is None:
        raise BuildError("TensorRT compiles on the GPU it is for, and CUDA sees none: build where the GPU is")
    if gpu.sm < LOWEST_SM:
        problem = f"{gpu.name} has compute capability {gpu.sm / 10}, engines need {LOWEST_SM / 10} or newer"
        raise BuildError(f"{problem}; use --backend onnxruntime")
    if attention == "plugin":
        library.find(library.PLUGINS)
    return Machine(trt, gpu, versions)


def check_release(backend: Backend, version: str) -> None:
    """Raises MissingDependency where an installed version is outside of the range whose API is the one used here."""
    if not backend.serves_release(version):
        problem = f"{backend.title} {version} is installed, the build needs {backend.releases_text}"
        raise MissingDependency(f"{problem}; {install_with(backend.extra)}")


def _beyond_plugin(networks: Iterable[TransformerDims]) -> str:
    """Words on a network whose attention our plugin has no kernel for; "" where there is none."""
    networks = tuple(networks)
    if any(n.delta for n in networks):
        return "gated delta-net layers have no plugin"
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


def sm_for_values(quantization: Quantization | None) -> int:
    """The least compute capability, times 10, of GPUs that multiply a target's values as they are stored; 0 where all
    do."""
    return LOWEST_FP8_SM if quantization and quantization.format.values == "float8_e4m3fn" else 0


def check_values(target: Checkpoint, gpu: str, sm: int) -> None:
    """Raises UsageError for a target quantised to values that this GPU does not multiply."""
    if sm < (lowest := sm_for_values(target.quantization)):
        needed = f"FP8, which needs compute capability {lowest / 10} or newer, and {gpu} has {sm / 10}"
        raise UsageError(f"{target.name} is quantised to {needed}; use the checkpoint before quantisation")


def runs_here(manifest: Manifest) -> bool:
    """Whether an engine is for a GPU of this machine, as every engine is that is compiled on the machine it is for."""
    here = {f"sm{gpu.sm}" for gpu in find_gpus()}
    return not BACKENDS[manifest.backend].portable or not here.isdisjoint(manifest.toolchain["gpus"].split())
