"""Calls of the CUDA runtime through cuda-python, and what CUDA says of this machine's GPU and driver."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from ddtree_trt.artifact.backends import TENSORRT
from ddtree_trt.device.packages import import_package
from ddtree_trt.errors import EngineError


def cuda_bindings(extra: str = TENSORRT.extra) -> Any:
    """The module `cuda.bindings.runtime`. Raises MissingDependency, which names the extra of a backend's name, where
    cuda-python is not installed."""
    return import_package("cuda.bindings.runtime", None, extra)


def call(api: Any, function: str, *arguments: Any) -> Any:
    """What a CUDA runtime function returns beside its status: nothing, one value or a tuple.

    Raises EngineError with the function's and the status's names and CUDA's text for it.
    """
    status, *results = getattr(api, function)(*arguments)
    if status != api.cudaError_t.cudaSuccess:
        _, text = api.cudaGetErrorString(status)
        raise EngineError(f"{function} failed with {status.name}: {_text(text)}")
    return results[0] if len(results) == 1 else tuple(results) or None


@dataclass(frozen=True)
class CurrentGpu:
    """The GPU that is current in this thread."""

    name: str
    major: int  # of its compute capability
    minor: int

    @property
    def sm(self) -> int:
        """Its compute capability as compilers write it: 90 for 9.0."""
        return 10 * self.major + self.minor


def current_gpu(api: Any) -> CurrentGpu | None:
    """The current GPU; None where CUDA sees none. Raises EngineError, for instance where there is no driver."""
    if not call(api, "cudaGetDeviceCount"):
        return None
    found = call(api, "cudaGetDeviceProperties", call(api, "cudaGetDevice"))
    return CurrentGpu(_text(found.name), found.major, found.minor)


@dataclass(frozen=True)
class CudaVersions:
    """Versions as they are written: 13.0."""

    runtime: str
    driver: str  # the newest CUDA that it supports


def cuda_versions(api: Any) -> CudaVersions:
    """The installed versions. Raises EngineError."""
    return CudaVersions(*(version_text(call(api, f"cuda{part}GetVersion")) for part in ("Runtime", "Driver")))


def cuda_of_driver() -> str | None:
    """The newest CUDA that the installed driver supports, found without cuda-python; None without a driver."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if status else version_text(version.value)


def version_text(number: int) -> str:
    """The written form, 13.0, of a version as CUDA's functions return it, 13000."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _text(found: bytes | str) -> str:
    """The text of a C string, which releases of cuda-python return in different types."""
    return (found.decode() if isinstance(found, bytes) else str(found)).rstrip("\0")
