"""What a TensorRT build needs of the machine: TensorRT, CUDA, a GPU and the plugin library, checked before any work."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_trt.errors import BuildError, MissingDependency, install_with
from ddtree_trt.plugins import library

LOWEST, BELOW = (11, 1), (12, 0)  # releases of TensorRT whose API is the one used here; as in pyproject.toml
LOWEST_SM = 80  # the first GPUs with bfloat16, and the oldest the kernels are compiled for
LOWEST_FP8_SM = 89  # the first GPUs that multiply FP8


@dataclass(frozen=True)
class Machine:
    tensorrt: str  # version, for instance 11.4.0.106
    cuda: str  # version of the CUDA runtime, for instance 13.0
    driver: str  # the highest CUDA version the driver supports
    gpu: str  # name
    sm: int  # compute capability, 90 for 9.0
    plugins: Path  # the plugin library, its ABI checked


def examine() -> Machine:
    """This machine, if it can build. Raises MissingDependency for what can be installed, BuildError for the rest."""
    tensorrt = _import("tensorrt").__version__
    if not LOWEST <= tuple(int(part) for part in tensorrt.split(".")[:2]) < BELOW:
        raise MissingDependency(
            f"TensorRT {tensorrt} is installed, the build needs {'.'.join(map(str, LOWEST))} or newer below "
            f"{BELOW[0]}; {install_with('tensorrt')}"
        )
    cuda = _import("cuda.bindings.runtime")
    count = _call(cuda, "cudaGetDeviceCount")
    if not count:
        raise BuildError(
            "TensorRT compiles on the GPU it is for, and CUDA sees none; build on the machine with the GPU"
        )
    device = _call(cuda, "cudaGetDeviceProperties", _call(cuda, "cudaGetDevice"))
    name = device.name.decode() if isinstance(device.name, bytes) else str(device.name)
    sm = 10 * device.major + device.minor
    if sm < LOWEST_SM:
        raise BuildError(
            f"{name} has compute capability {device.major}.{device.minor}, the kernels need {LOWEST_SM / 10} or newer; "
            "use --backend onnxruntime"
        )
    return Machine(
        tensorrt=tensorrt,
        cuda=_version(_call(cuda, "cudaRuntimeGetVersion")),
        driver=_version(_call(cuda, "cudaDriverGetVersion")),
        gpu=name.rstrip("\0"),
        sm=sm,
        plugins=library.find(library.PLUGINS),
    )


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a package whose shared libraries are not there
        reason = str(error).splitlines()[0]
        raise MissingDependency(
            f"the tensorrt backend cannot import {module} ({reason}); {install_with('tensorrt')}"
        ) from error


def _call(cuda: Any, name: str, *arguments: Any) -> Any:
    """What a CUDA runtime function returns beside its status. Raises BuildError naming the function and the status."""
    status, *result = getattr(cuda, name)(*arguments)
    if status != cuda.cudaError_t.cudaSuccess:
        raise BuildError(f"{name} failed with {status.name}; is the NVIDIA driver installed and new enough?")
    return result[0]


def _version(number: int) -> str:
    """CUDA's 13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"
