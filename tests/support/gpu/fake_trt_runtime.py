"""The runtimes of TensorRT and TensorRT for RTX over fake CUDA: engines whose passes ONNX Runtime computes, from and
into fake device memory.

What runs is the very graph that TensorRT would compile (see `lowered.py`). Contexts insist on what TensorRT insists
on: a profile, a workspace, addresses at multiples of 256, shapes inside the profile, caches that are updated in place,
one pass before a capture, and that a context is left alone once a graph was captured from it. `calls` lists every call,
which the shipping bindings must take where they are installed.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_cuda import FakeCuda
from lowered import Session
from real_builder import rtx
from real_tensorrt import check_call

from ddtree_trt import plugins
from ddtree_trt.artifact import tensors as names

VERSION = "11.4.0.106"
WORKSPACE_BYTES = 5000
ALIGNMENT = 256
_SHIPPED = importlib.util.find_spec("tensorrt_rtx_bindings") is not None
_CHECKED: set[tuple[Any, ...]] = set()  # calls that it takes, by the types of arguments


ExecutionContextAllocationStrategy = Enum("ExecutionContextAllocationStrategy", "STATIC ON_PROFILE_CHANGE USER_MANAGED")
DynamicShapesKernelSpecializationStrategy = Enum("DynamicShapesKernelSpecializationStrategy", "LAZY EAGER NONE")
CudaGraphStrategy = Enum("CudaGraphStrategy", "DISABLED WHOLE_GRAPH_CAPTURE")


class ILogger(ABC):
    Severity = Enum("Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE")

    @abstractmethod
    def log(self, severity: Any, msg: str) -> None: ...


class FakeTrt:
    """Stands for the module `tensorrt` or `tensorrt_rtx`. `plans` maps a plan's bytes to the engine inside."""

    __version__ = VERSION
    __spec__ = ModuleSpec("pretended", None)  # it is found by `importlib.util.find_spec`
    ILogger, ExecutionContextAllocationStrategy = ILogger, ExecutionContextAllocationStrategy
    CudaGraphStrategy = CudaGraphStrategy
    DynamicShapesKernelSpecializationStrategy = DynamicShapesKernelSpecializationStrategy

    def __init__(self, cuda: FakeCuda, plans: dict[bytes, FakeEngine]) -> None:
        self.cuda, self.plans = cuda, plans
        self.calls: list[tuple[Any, ...]] = []
        self.loaded: list[str] = []
        self.compiled = 0  # kernels that TensorRT for RTX had to compile
        for engine in plans.values():
            engine.trt = self

    def record(self, cls: str, method: str, *arguments: Any) -> None:
        """List a call. Raises WrongCall where the class that ships does not take it."""
        kind = (cls, method, *map(type, arguments))
        if _SHIPPED and kind not in _CHECKED:
            check_call(getattr(getattr(rtx(), cls), method), arguments, {})
            _CHECKED.add(kind)
        self.calls.append((cls, method, *arguments))

    def get_plugin_registry(self) -> FakeTrt:
        return self  # all that is asked of it is below

    @property
    def all_creators(self) -> list[Any]:
        identity = {"plugin_version": plugins.VERSION, "plugin_namespace": plugins.NAMESPACE}
        names = plugins.NAMES if self.loaded else ()
        return [SimpleNamespace(name=name, **identity) for name in names]

    def load_library(self, path: str) -> object:
        self.record("IPluginRegistry", "load_library", path)
        self.loaded.append(path)
        return object()

    def Runtime(self, log: Any) -> Any:
        def deserialize_cuda_engine(buffer: Any) -> Any:
            plan = bytes(buffer)
            if plan in self.plans:
                assert self.loaded or not self.plans[plan].plugins, "plugins come before the plans that use them"
            self.record("Runtime", "deserialize_cuda_engine", plan)
            if plan not in self.plans:
                log.log(ILogger.Severity.WARNING, "this is a warning")
                log.log(ILogger.Severity.ERROR, "Serialization\nassertion failed")
                return None
            self.plans[plan].log = log
            return self.plans[plan]

        return SimpleNamespace(deserialize_cuda_engine=deserialize_cuda_engine)


class FakeEngine:
    """An ICudaEngine over a session of ONNX Runtime."""

    trt: FakeTrt
    log: ILogger

    def __init__(self, name: str, lowered: Session, sizes: Mapping[str, Any]) -> None:
        """`sizes`: dimension → range."""
        self.name, self.session, self.types, self.sizes = name, lowered.session, lowered.types, sizes
        self.inputs = {i.name: tuple(i.shape) for i in self.session.get_inputs()}
        self.outputs = {o.name: tuple(o.shape) for o in self.session.get_outputs()}
        self._all = [*self.inputs, *self.outputs]
        self.plugins = names.SLOT_IDS in self.inputs  # whether there are plugin layers
        self.num_io_tensors = len(self._all)
        self.device_memory_size_v2 = WORKSPACE_BYTES
        self.contexts = 0

    def get_tensor_name(self, index: int) -> str:
        return self._all[index]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(-1 if isinstance(d, str) else d for d in (self.inputs | self.outputs)[name])

    def create_execution_context(self, made_with: Any) -> FakeContext:
        """`made_with`: a strategy of allocation, or a configuration that has one."""
        self.trt.record("ICudaEngine", "create_execution_context", made_with)
        config = made_with if isinstance(made_with, IRuntimeConfig) else None
        assert (config.allocation if config else made_with) is ExecutionContextAllocationStrategy.USER_MANAGED
        self.contexts += 1
        return FakeContext(self, config)

    def create_runtime_config(self) -> IRuntimeConfig:
        self.trt.record("ICudaEngine", "create_runtime_config")
        return IRuntimeConfig(self.trt)


class IRuntimeConfig:
    """Of TensorRT for RTX."""

    def __init__(self, trt: FakeTrt) -> None:
        self.trt = trt
        self.allocation = ExecutionContextAllocationStrategy.STATIC
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED
        self.dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY
        self.cache: IRuntimeCache | None = None

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self.trt.record("IRuntimeConfig", "set_execution_context_allocation_strategy", strategy)
        self.allocation = strategy

    def create_runtime_cache(self) -> IRuntimeCache:
        self.trt.record("IRuntimeConfig", "create_runtime_cache")
        return IRuntimeCache(self.trt)

    def set_runtime_cache(self, cache: IRuntimeCache) -> bool:
        self.trt.record("IRuntimeConfig", "set_runtime_cache", cache)
        self.cache = cache
        return True


class IRuntimeCache:
    """The kernels of TensorRT for RTX by plan, profile and shapes, as text behind the GPU they are for."""

    def __init__(self, trt: FakeTrt) -> None:
        self.trt = trt
        self.kernels: set[str] = set()

    @property
    def _head(self) -> str:
        return f"kernels for sm{self.trt.cuda.sm}"

    def serialize(self) -> bytes:
        self.trt.record("IRuntimeCache", "serialize")
        return "\n".join([self._head, *sorted(self.kernels)]).encode()

    def deserialize(self, blob: bytes) -> bool:
        self.trt.record("IRuntimeCache", "deserialize", blob)
        head, *kernels = blob.decode(errors="replace").split("\n")
        if head == self._head:
            self.kernels |= set(kernels)
        return head == self._head


class FakeContext:
    def __init__(self, engine: FakeEngine, config: IRuntimeConfig | None) -> None:
        self._engine, self._cuda, self._config = engine, engine.trt.cuda, config
        self._profile: int | None = None
        self._addresses: dict[str, int] = {}
        self._shapes = {n: s for n, s in engine.inputs.items() if not any(isinstance(d, str) for d in s)}
        self._workspace: tuple[int, int] | None = None
        self._flushed = self._captured = False

    def _record(self, method: str, *arguments: Any) -> None:
        self._engine.trt.record("IExecutionContext", method, *arguments)

    def _changed(self, method: str, *arguments: Any) -> None:
        assert not self._captured, "a graph was captured from this context"
        self._flushed = False
        self._record(method, *arguments)

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._changed("set_optimization_profile_async", profile, stream)
        assert stream in self._cuda.streams
        self._profile = profile
        return profile == 0

    def set_device_memory(self, address: int, size: int) -> None:
        self._changed("set_device_memory", address, size)
        assert address % ALIGNMENT == 0 and self._cuda.device.holds(address, size)
        assert size >= self._engine.device_memory_size_v2
        self._workspace = (address, size)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._changed("set_tensor_address", name, address)
        self._addresses[name] = address
        return (name in self._engine.inputs or name in self._engine.outputs) and address % ALIGNMENT == 0

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._changed("set_input_shape", name, shape)
        assert self._profile is not None
        self._shapes[name] = shape
        sizes, wanted = self._engine.sizes, self._engine.inputs[name]
        return len(shape) == len(wanted) and all(
            sizes[d][0] <= n <= sizes[d][2] if isinstance(d, str) else n == d
            for n, d in zip(shape, wanted, strict=True)
        )

    def infer_shapes(self) -> list[str]:
        self._record("infer_shapes")
        return [n for n in self._engine.inputs if n not in self._shapes or n not in self._addresses]

    def execute_async_v3(self, stream: int) -> bool:
        self._record("execute_async_v3", stream)
        assert stream in self._cuda.streams
        assert self._workspace is not None
        assert self._profile is not None
        assert set(self._addresses) == {*self._engine.inputs, *self._engine.outputs}
        for tensor, address in self._addresses.items():
            if tensor.startswith("present_"):
                assert address == self._addresses["past_" + tensor.removeprefix("present_")], "not in place"
        config = self._config
        if config is not None:
            assert config.cache is not None
            self._compile(config)
        if self._cuda.capturing is not None:
            assert self._flushed, "the first pass of new shapes must not be captured"
            self._captured = True
        self._flushed = True
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        self._cuda.enqueue(lambda: self._run(shapes, addresses), "pass", self._engine.name, self._profile)
        return True

    def _compile(self, config: IRuntimeConfig) -> None:
        """Kernels for these shapes, or those for all shapes. What LAZY does would come into a graph's way."""
        strategies = DynamicShapesKernelSpecializationStrategy
        strategy = config.dynamic_shapes_kernel_specialization_strategy
        assert strategy is not strategies.LAZY and config.cuda_graph_strategy is CudaGraphStrategy.DISABLED
        assert (self._cuda.capturing is None) or strategy is strategies.EAGER
        shapes = sorted(self._shapes.items()) if strategy is strategies.EAGER else "any"
        kernel = f"{self._engine.name} {self._profile} {shapes}"
        assert config.cache is not None
        if kernel not in config.cache.kernels:
            assert self._cuda.capturing is None, "a kernel is compiled while a graph is recorded"
            config.cache.kernels.add(kernel)
            self._engine.trt.compiled += 1

    def _run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        def view(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return self._cuda.device.view(addresses[name], size).view(dtype).reshape(shape)

        engine = self._engine
        feed = {name: view(name, shape, engine.types[name]) for name, shape in shapes.items()}
        dims = [(d, n) for name, shape in shapes.items() for d, n in zip(engine.inputs[name], shape, strict=True)]
        for dimension in {d for d, _ in dims if isinstance(d, str)}:
            assert len({n for d, n in dims if d == dimension}) == 1, f"inputs disagree on {dimension}"
        results = dict(zip(engine.outputs, engine.session.run(list(engine.outputs), feed), strict=True))
        for name, result in results.items():
            view(name, result.shape, result.dtype)[...] = result
