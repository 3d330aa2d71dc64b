"""The libraries of NVIDIA as `build` and `runtime` use them: imports, CUDA's calls, TensorRT's log and plugins."""

import ctypes
import importlib
import importlib.util
import logging
from pathlib import Path
from typing import Any, NamedTuple

from ddtree_trt import plugins
from ddtree_trt.artifact.backends import TENSORRT, TENSORRT_RTX
from ddtree_trt.errors import DDTreeError, EngineError, MissingDependency, install_with


def import_package(module: str, refusal: str | None = None, extra: str = TENSORRT.extra) -> Any:
    """The imported module. Raises MissingDependency, which begins with `refusal` and names the extra."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a package whose shared libraries are absent
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        refusal = refusal or f"the {extra} backend cannot import {module}"
        raise MissingDependency(f"{refusal} ({reason}); {install_with(extra)}") from error


def cuda_bindings(extra: str = TENSORRT.extra) -> Any:
    """The module `cuda.bindings.runtime`. Raises MissingDependency where cuda-python is not installed."""
    return import_package("cuda.bindings.runtime", None, extra)


def call(api: Any, function: str, *arguments: Any) -> Any:
    """What a CUDA runtime function returns beside its status: nothing, one value or a tuple. Raises EngineError with
    the function's and the status's names and CUDA's text for it."""
    status, *results = getattr(api, function)(*arguments)
    if status != api.cudaError_t.cudaSuccess:
        _, text = api.cudaGetErrorString(status)
        raise EngineError(f"{function} failed with {status.name}: {_text(text)}")
    return results[0] if len(results) == 1 else tuple(results) or None


class CurrentGpu(NamedTuple):
    name: str
    sm: int  # its compute capability as compilers write it: 90 for 9.0


def current_gpu(api: Any) -> CurrentGpu | None:
    """This thread's GPU; None where CUDA sees none. Raises EngineError, for instance where there is no driver."""
    if not call(api, "cudaGetDeviceCount"):
        return None
    found = call(api, "cudaGetDeviceProperties", call(api, "cudaGetDevice"))
    return CurrentGpu(_text(found.name), 10 * found.major + found.minor)


class CudaVersions(NamedTuple):
    runtime: str
    driver: str  # the newest CUDA that it supports


def cuda_versions(api: Any) -> CudaVersions:
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


_SHOWN_ERRORS = 5  # messages of TensorRT in one error of ours


def import_tensorrt(refusal: str | None = None, *, rtx: bool = False) -> Any:
    """The module of TensorRT, or with `rtx` that of TensorRT for RTX, whose interface is the same. Raises
    MissingDependency, whose text begins with `refusal`, where it cannot be imported."""
    if not rtx:
        return import_package("tensorrt", refusal, TENSORRT.extra)
    # The package `tensorrt-rtx` brings the first name along; the wheels that it consists of have the second alone.
    if importlib.util.find_spec("tensorrt_rtx") is None and importlib.util.find_spec("tensorrt_rtx_bindings"):
        return import_package("tensorrt_rtx_bindings", refusal, TENSORRT_RTX.extra)
    return import_package("tensorrt_rtx", refusal, TENSORRT_RTX.extra)


def make_log(trt: Any, warnings: logging.Logger | None = None) -> Any:
    """An `ILogger` that keeps TensorRT's error messages for the text of our errors: `words()` returns the latest in one
    line, `clear()` forgets them. TensorRT's warnings go to `warnings`, or nowhere."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._errors: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                self._errors.append(" ".join(msg.split()))
            elif severity == trt.ILogger.Severity.WARNING and warnings is not None:
                warnings.warning("%s", msg)

        def clear(self) -> None:
            self._errors.clear()

        def words(self) -> str:
            return "; ".join(self._errors[-_SHOWN_ERRORS:])

    return Log()


def load_plugins(trt: Any, log: Any, path: Path, refusal: type[DDTreeError]) -> None:
    """Load the plugin library into the process's registry, once. Raises `refusal` where TensorRT does not take it."""
    registry = trt.get_plugin_registry()

    def missing() -> list[str]:
        found = {(c.name, c.plugin_version, c.plugin_namespace) for c in registry.all_creators}
        return [name for name in plugins.NAMES if (name, plugins.VERSION, plugins.NAMESPACE) not in found]

    if missing() and (registry.load_library(str(path)) is None or missing()):
        raise refusal(
            f"TensorRT {trt.__version__} does not take the plugin library {path}: it registered no "
            f"{plugins.NAMESPACE}::{missing()[0]} version {plugins.VERSION}; run `make plugins` again with the "
            f"headers of this TensorRT. {log.words()}".rstrip()
        )


def io_tensors(engine: Any) -> set[str]:
    return {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
