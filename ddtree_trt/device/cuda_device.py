"""The GPU as the TensorRT engine uses it: one stream, memory that is released together, copies, graphs. Every call that
CUDA refuses becomes an EngineError; work that fails on the device surfaces at the next call."""

import ctypes
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.device.buffers import aligned
from ddtree_trt.device.libraries import call


class Device:
    """The GPU that is current where this is made. One thread at a time uses it; nothing waits but `synchronize`."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self._index = call(api, "cudaGetDevice")
        self._thread = threading.get_ident()
        self.waits = 0  # how often the host has waited
        self._graphs: list[Any] = []
        self._held = ExitStack()  # gives back memory, and at last the stream
        self._stream: Any = self._call("cudaStreamCreateWithFlags", api.cudaStreamNonBlocking)
        self._held.callback(self._call, "cudaStreamDestroy", self._stream)

    def _call(self, function: str, *arguments: Any) -> Any:
        thread = threading.get_ident()
        if thread != self._thread:  # each thread has a current GPU of its own, and an engine may be handed to another
            call(self.api, "cudaSetDevice", self._index)
            self._thread = thread
        return call(self.api, function, *arguments)

    @property
    def stream(self) -> int:
        return int(self._stream)

    def free_bytes(self) -> tuple[int, int]:
        """(free, total) bytes of the GPU's memory."""
        free, total = self._call("cudaMemGetInfo")
        return int(free), int(total)

    def allocate(self, size: int) -> int:
        """The address of `size` bytes on the device."""
        address = int(self._call("cudaMalloc", size))
        self._held.callback(self._call, "cudaFree", address)
        return address

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Page-locked host memory, uint8 [size], which copies read and write without a staging buffer."""
        address = int(self._call("cudaHostAlloc", size, self.api.cudaHostAllocDefault))
        self._held.callback(self._call, "cudaFreeHost", address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def clear(self, address: int, size: int) -> None:
        self._call("cudaMemsetAsync", address, 0, size, self._stream)

    def upload(self, address: int, source: NDArray[Any]) -> None:
        """Put a contiguous array on the device. Pinned memory is read later: it must not change before a wait."""
        kind = self.api.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", address, source.ctypes.data, source.nbytes, kind, self._stream)

    def download(self, target: NDArray[Any], address: int) -> None:
        """Fill a contiguous array from the device; it has its content after the next wait."""
        kind = self.api.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", target.ctypes.data, address, target.nbytes, kind, self._stream)

    def copy(self, target: int, source: int, size: int) -> None:
        kind = self.api.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._call("cudaMemcpyAsync", target, source, size, kind, self._stream)

    def synchronize(self) -> None:
        self.waits += 1
        self._call("cudaStreamSynchronize", self._stream)

    def capture(self, work: Callable[[], None]) -> Any:
        """A graph, for `launch`, of what `work` puts on the stream, which is recorded and not run."""
        # Thread-local: other threads of the process may allocate while this one records.
        mode = self.api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self._stream, mode)
        try:
            work()
        except BaseException:
            # An error of ending the capture would hide the first one.
            status, recorded = self.api.cudaStreamEndCapture(self._stream)
            if status == self.api.cudaError_t.cudaSuccess:
                self.api.cudaGraphDestroy(recorded)
            raise
        recorded = self._call("cudaStreamEndCapture", self._stream)
        try:
            graph = self._call("cudaGraphInstantiate", recorded, 0)
        finally:
            self._call("cudaGraphDestroy", recorded)
        self._graphs.append(graph)
        return graph

    def launch(self, graph: Any) -> None:
        self._call("cudaGraphLaunch", graph, self._stream)

    def forget(self, graph: Any) -> None:
        """Wait for the stream, then destroy a graph of `capture`."""
        self.synchronize()
        self._graphs.remove(graph)
        self._call("cudaGraphExecDestroy", graph)

    def stop(self) -> None:
        """Wait for the stream and destroy every graph, before the memory they use is released."""
        if self._stream is not None:
            with ExitStack() as stack:
                while self._graphs:
                    stack.callback(self._call, "cudaGraphExecDestroy", self._graphs.pop())
                self.synchronize()

    def close(self) -> None:
        """Release everything, also after an error, which is raised at the end; a second call does nothing."""
        try:
            self.stop()
        finally:
            self._stream = None
            self._held.close()


class Upload:
    """Control data of one stage: int32 arrays that go to the device in one copy. Equal shapes give equal addresses, so
    that a graph captured with them reads what is sent next."""

    def __init__(self, device: Device, address: int, host: NDArray[np.uint8]) -> None:
        """`host` is pinned memory, `address` the memory on the device it is copied to."""
        self._device = device
        self._address = address
        self._host = host
        self._sent_after = -1  # the host's waits before the last copy

    def send(self, arrays: Mapping[str, NDArray[np.int32]]) -> dict[str, int]:
        """Addresses of the arrays on the device by name, each at a multiple of 256 bytes."""
        if self._sent_after == self._device.waits:
            self._device.synchronize()  # the copy before this one may not have been made yet
        addresses, end = {}, 0
        for name, array in arrays.items():
            addresses[name] = self._address + end
            self._host[end : end + array.nbytes].view(np.int32)[:] = array.reshape(-1)
            end += aligned(array.nbytes)
        self._device.upload(self._address, self._host[:end])
        self._sent_after = self._device.waits
        return addresses
