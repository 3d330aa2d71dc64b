"""The kernels that TensorRT for RTX compiles on this machine, kept in the engine directory.

Its plans hold no kernels for the GPU: they are compiled when an execution context meets its shapes, and a cache that is
stored makes the next start short. TensorRT's own plans are complete and need none.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ddtree_trt.files import write_atomically

_log = logging.getLogger("ddtree_trt.tensorrt")


class KernelCache:
    """One IRuntimeCache for all contexts of an engine directory."""

    def __init__(self, trt: Any, path: Path) -> None:
        """`trt` is the module of TensorRT for RTX, `path` where the cache is stored."""
        self._trt = trt
        self._path = path
        self._cache: Any = None  # made by the first engine's configuration
        self._stored = b""  # content of the file, where it is of use

    def make_context(self, engine: Any, captured: bool) -> Any:
        """An execution context without memory, or None.

        Contexts of captured passes compile kernels for their shapes at once: compiled later, as is the default, they
        would take the place of kernels that a graph holds. Other passes, which have any length, get kernels that serve
        all shapes.
        """
        trt = self._trt
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        strategies = trt.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER if captured else strategies.NONE
        config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # passes are captured by this engine
        if self._cache is None:
            self._cache = self._load(config)
        config.set_runtime_cache(self._cache)
        return engine.create_execution_context(config)

    def _load(self, config: Any) -> Any:
        """A cache with the stored kernels, or an empty one where there are none for this GPU, driver and version."""
        cache = config.create_runtime_cache()
        try:
            stored = self._path.read_bytes()
        except FileNotFoundError:
            return cache
        except OSError as error:
            _log.warning("%s cannot be read (%s): kernels are compiled anew", self._path, error.strerror or error)
            return cache
        if stored and cache.deserialize(stored):
            self._stored = stored
        else:
            _log.info("%s is of another GPU, driver or version: kernels are compiled anew", self._path)
        return cache

    def store(self) -> None:
        """Store what has been compiled since; where it cannot be written, a warning is logged."""
        if self._cache is None:
            return
        serialized = self._cache.serialize()
        content = b"" if serialized is None else bytes(memoryview(serialized))
        if content in (b"", self._stored):
            return
        try:
            write_atomically(self._path, content)
            self._stored = content
        except OSError as error:
            _log.warning(
                "%s cannot be written (%s): kernels are compiled at every start", self._path, error.strerror or error
            )

    def close(self) -> None:
        """Store and release the cache. Contexts must have been released before."""
        try:
            self.store()
        finally:
            self._cache = None
