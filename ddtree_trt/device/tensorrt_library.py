"""TensorRT and TensorRT for RTX as `build` and `runtime` use them: the module, its log, our plugins in its registry, an
engine's tensors."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

from ddtree_trt import plugins
from ddtree_trt.artifact.backends import TENSORRT, TENSORRT_RTX
from ddtree_trt.device.packages import import_package
from ddtree_trt.errors import DDTreeError

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
    """Names of an ICudaEngine's inputs and outputs."""
    return {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
