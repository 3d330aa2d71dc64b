"""Requirements of a TensorRT build: TensorRT, CUDA, a GPU and the plugin library, checked before any work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddtree_trt.device.cuda_calls import cuda_bindings, cuda_versions, current_gpu
from ddtree_trt.device.tensorrt_library import import_tensorrt
from ddtree_trt.errors import BuildError, EngineError, MissingDependency, install_with
from ddtree_trt.plugins import LOWEST_SM, library

LOWEST, BELOW = (11, 1), (12, 0)  # releases of TensorRT whose API is the one used here; as in pyproject.toml
LOWEST_FP8_SM = 89  # the first GPUs that multiply FP8


@dataclass(frozen=True)
class Machine:
    """A machine that can build, as the manifest records it."""

    tensorrt: str  # version, for instance 11.4.0.106
    cuda: str  # version of the CUDA runtime, for instance 13.0
    driver: str  # the highest CUDA version the driver supports
    gpu: str  # name
    sm: int  # compute capability, 90 for 9.0
    plugins: Path  # the plugin library, its ABI checked


def examine() -> Machine:
    """This machine, which can build. Raises MissingDependency for what can be installed, BuildError for the rest."""
    tensorrt = import_tensorrt().__version__
    if not LOWEST <= tuple(int(part) for part in tensorrt.split(".")[:2]) < BELOW:
        raise MissingDependency(
            f"TensorRT {tensorrt} is installed, the build needs {'.'.join(map(str, LOWEST))} or newer below "
            f"{BELOW[0]}; {install_with('tensorrt')}"
        )
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
            f"{gpu.name} has compute capability {gpu.major}.{gpu.minor}, the kernels need {LOWEST_SM / 10} or newer; "
            "use --backend onnxruntime"
        )
    return Machine(
        tensorrt=tensorrt,
        cuda=versions.runtime,
        driver=versions.driver,
        gpu=gpu.name,
        sm=gpu.sm,
        plugins=library.find(library.PLUGINS),
    )
