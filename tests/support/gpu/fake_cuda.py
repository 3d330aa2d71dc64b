"""The CUDA runtime as far as the TensorRT engine uses it, on host memory, for `sys.modules["cuda.bindings.runtime"]`.

The stream is late on purpose: nothing that was put on it happens before the host waits, so that whoever overwrites
pinned memory too early, or reads a result too soon, is caught. Fresh memory is full of NaN. Every call is checked
against the allocations there are, and logged.
"""

import ctypes
import threading
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np

ALIGNMENT = 256
Work = Callable[[], None]


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorIllegalAddress = 700
    cudaErrorStreamCaptureInvalidated = 901


cudaMemcpyKind = IntEnum("cudaMemcpyKind", "cudaMemcpyHostToDevice cudaMemcpyDeviceToHost cudaMemcpyDeviceToDevice")
cudaStreamCaptureMode = IntEnum("cudaStreamCaptureMode", "cudaStreamCaptureModeThreadLocal")


class _Memory:
    """Allocations by address."""

    def __init__(self) -> None:
        self.blocks: dict[int, np.ndarray] = {}

    def add(self, size: int) -> int:
        raw = np.full(size + ALIGNMENT, 0xFF, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        block = raw[start : start + size]
        self.blocks[block.ctypes.data] = block
        return block.ctypes.data

    def holds(self, address: int, size: int) -> bool:
        return any(start <= address and address + size <= start + len(b) for start, b in self.blocks.items())

    def view(self, address: int, size: int) -> np.ndarray:
        """uint8 [size]; the test fails where there is no such memory."""
        assert self.holds(address, size), f"{size} bytes at {address:#x} are not allocated"
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class FakeCuda:
    """Stands for the module. `fail` maps a function's name to the status its next call returns."""

    cudaError_t, cudaMemcpyKind, cudaStreamCaptureMode = cudaError_t, cudaMemcpyKind, cudaStreamCaptureMode
    cudaStreamNonBlocking, cudaHostAllocDefault = 1, 0

    name, count, memory_bytes, runtime, driver = "Pretended GPU\0\0", 1, 1 << 30, 13000, 13000

    def __init__(self, sm: int = 90) -> None:
        self.sm = sm
        self.device, self.pinned = _Memory(), _Memory()
        self.log: list[tuple[Any, ...]] = []
        self.fail: dict[str, cudaError_t] = {}
        self.streams: set[int] = set()
        self.graphs: dict[int, list[Work]] = {}
        self._recorded: dict[int, list[Work]] = {}
        self._queue: list[Work] = []
        self.capturing: list[Work] | None = None
        self._next = 1
        self.current: dict[int, int] = {}  # thread → GPU; the one that opens an engine has chosen number 1

    @property
    def leaks(self) -> list[str]:
        """What has not been given back."""
        held = {"memory": self.device.blocks, "pinned": self.pinned.blocks, "graphs": self.graphs}
        held |= {"recorded": self._recorded, "streams": dict.fromkeys(self.streams)}
        return [name for name, things in held.items() if things]

    def enqueue(self, work: Work, *entry: Any) -> None:
        """Put work on the stream, or into the graph that is being recorded."""
        assert self.streams
        assert self.current.get(threading.get_ident(), 0) == 1, "another GPU is this thread's current one"
        self.log.append(("recorded", *entry) if self.capturing is not None else entry)
        (self._queue if self.capturing is None else self.capturing).append(work)

    def _handle(self) -> int:
        self._next += 1
        return self._next

    def __getattribute__(self, name: str) -> Any:
        """A function of CUDA returns its status before what the method below returns."""
        found = super().__getattribute__(name)
        if not (name.startswith("cuda") and callable(found)) or isinstance(found, type):
            return found

        def call(*arguments: Any) -> tuple[Any, ...]:
            if (status := self.fail.pop(name, None)) is not None:
                return (status, *([None] if name != "cudaStreamSynchronize" else []))
            result = found(*arguments)
            results = result if isinstance(result, tuple) else (result,) * (result is not None)
            return (cudaError_t.cudaSuccess, *results)

        return call

    def cudaGetErrorString(self, status: IntEnum) -> Any:
        return f"words for {int(status)}".encode()

    def cudaGetDeviceCount(self) -> Any:
        return self.count

    def cudaGetDevice(self) -> Any:
        return self.current.setdefault(threading.get_ident(), 1)

    def cudaSetDevice(self, index: int) -> Any:
        self.current[threading.get_ident()] = index

    def cudaGetDeviceProperties(self, device: int) -> Any:
        return SimpleNamespace(name=self.name.encode(), major=self.sm // 10, minor=self.sm % 10)

    def cudaRuntimeGetVersion(self) -> Any:
        return self.runtime

    def cudaDriverGetVersion(self) -> Any:
        return self.driver

    def cudaMemGetInfo(self) -> Any:
        used = sum(map(len, self.device.blocks.values()))
        return self.memory_bytes - used, self.memory_bytes

    def cudaStreamCreateWithFlags(self, flags: int) -> Any:
        handle = self._handle()
        self.streams.add(handle)
        return handle

    def cudaStreamDestroy(self, stream: int) -> Any:
        self.streams.remove(stream)

    def cudaStreamSynchronize(self, stream: int) -> Any:
        assert stream in self.streams
        assert self.capturing is None, "a wait ends the recording of a graph"
        self.log.append(("wait",))
        while self._queue:
            self._queue.pop(0)()

    def cudaMalloc(self, size: int) -> Any:
        self.log.append(("malloc", size))
        return self.device.add(size)

    def cudaFree(self, address: int) -> Any:
        del self.device.blocks[address]

    def cudaHostAlloc(self, size: int, flags: int) -> Any:
        return self.pinned.add(size)

    def cudaFreeHost(self, address: int) -> Any:
        del self.pinned.blocks[address]

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> Any:
        self.enqueue(lambda: self.device.view(address, size).fill(value), "clear", size)

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: Any, stream: int) -> Any:
        assert stream in self.streams
        if kind == cudaMemcpyKind.cudaMemcpyHostToDevice:
            if self.pinned.holds(source, size):
                read = self.pinned.view(source, size)
            else:  # pageable memory is copied aside before the call returns
                read = np.array(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(source)))
            written, name = self.device.view(target, size), "upload"
        elif kind == cudaMemcpyKind.cudaMemcpyDeviceToHost:
            read, name = self.device.view(source, size), "download"
            written = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(target))
        else:
            read, written, name = self.device.view(source, size), self.device.view(target, size), "copy"
            assert source + size <= target or target + size <= source, "ranges of one copy overlap"

        def work() -> None:
            written[:] = read

        self.enqueue(work, name, size)

    def cudaStreamBeginCapture(self, stream: int, mode: IntEnum) -> Any:
        assert self.capturing is None
        self.capturing = []
        self.log.append(("capture",))

    def cudaStreamEndCapture(self, stream: int) -> Any:
        assert self.capturing is not None
        handle = self._handle()
        self._recorded[handle], self.capturing = self.capturing, None
        return handle

    def cudaGraphInstantiate(self, graph: int, flags: int) -> Any:
        handle = self._handle()
        self.graphs[handle] = list(self._recorded[graph])
        return handle

    def cudaGraphDestroy(self, graph: int) -> Any:
        del self._recorded[graph]

    def cudaGraphLaunch(self, graph: int, stream: int) -> Any:
        assert self.capturing is None
        self.log.append(("launch", graph))
        self._queue += self.graphs[graph]

    def cudaGraphExecDestroy(self, graph: int) -> Any:
        del self.graphs[graph]
