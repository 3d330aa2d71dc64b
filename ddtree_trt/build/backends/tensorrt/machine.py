"""Requirements of a TensorRT build: TensorRT, CUDA, a GPU and the plugin library, checked before any work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddtree_trt.artifact.backends import ONNXRUNTIME, TENSORRT, TORCH, Backend
from ddtree_trt.build.backends.base import Attention
from ddtree_trt.device.cuda_calls import cuda_bindings, cuda_versions, current_gpu
from ddtree_trt.device.tensorrt_library import import_tensorrt
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.errors import BuildError, EngineError, MissingDependency, UsageError, install_with
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.plugins import LOWEST_SM, library

if TYPE_CHECKING:
    from ddtree_trt.build.checkpoint.quantization import Quantization
    from ddtree_trt.build.checkpoint.reader import Checkpoint

LOWEST_FP8_SM = 89  # the first GPUs that multiply FP8


@dataclass(frozen=True)
class Machine:
    """A machine that can build, as the manifest records it."""

    trt: Any  # the module
    cuda: str  # version of the CUDA runtime, for instance 13.0
    driver: str  # the highest CUDA version the driver supports
    gpu: str  # name
    sm: int  # compute capability, 90 for 9.0

    @property
    def tensorrt(self) -> str:
        """Version, for instance 11.4.0.106."""
        return str(self.trt.__version__)


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
        raise BuildError(
            "TensorRT compiles on the GPU it is for, and CUDA sees none; build on the machine with the GPU"
        )
    if gpu.sm < LOWEST_SM:
        raise BuildError(
            f"{gpu.name} has compute capability {gpu.major}.{gpu.minor}, engines need {LOWEST_SM / 10} or newer; "
            "use --backend onnxruntime"
        )
    if attention == "plugin":
        library.find(library.PLUGINS)
    return Machine(trt, versions.runtime, versions.driver, gpu.name, gpu.sm)


def check_release(backend: Backend, version: str) -> None:
    """Raises MissingDependency where an installed version is outside of the range whose API is the one used here."""
    if not backend.serves_release(version):
        raise MissingDependency(
            f"{backend.title} {version} is installed, the build needs {backend.releases_text}; "
            f"{install_with(backend.extra)}"
        )


def check_layers(networks: Iterable[TransformerDims], backend: Backend) -> None:
    """Raises UsageError for a network with layers that no lowering to TensorRT has."""
    networks = tuple(networks)
    for kind in map(kind_of, networks):
        if backend.half not in kind.halves:
            others = " or ".join(b.name for b in (TORCH, ONNXRUNTIME) if b.half in kind.halves)
            raise UsageError(f"{kind.title}s are not implemented for {TENSORRT.title}; use --backend {others}")
    if not backend.experts and any(dims.experts for dims in networks):
        raise UsageError(f"mixtures of experts are not implemented for {TENSORRT.title}; use --backend torch")


def sm_for_values(quantization: Quantization | None) -> int:
    """The least compute capability, times 10, of GPUs that multiply a target's values as they are stored; 0 where all
    do."""
    return LOWEST_FP8_SM if quantization and quantization.format.values == "float8_e4m3fn" else 0


def check_values(target: Checkpoint, gpu: str, sm: int) -> None:
    """Raises UsageError for a target quantised to values that this GPU does not multiply."""
    lowest = sm_for_values(target.quantization)
    if sm < lowest:
        raise UsageError(
            f"{target.name} is quantised to FP8, which needs compute capability {lowest / 10} or newer, and {gpu} has "
            f"{sm / 10}; use the checkpoint before quantisation"
        )
