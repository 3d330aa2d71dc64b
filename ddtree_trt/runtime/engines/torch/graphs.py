"""Copies between host and device, one up and one down per stage, and stages captured as CUDA graphs.

On a CPU the same objects are plain memory and plain calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGN = 4  # int32 values: the kernels ask for multiples of 16 bytes


class Upload:
    """Control data of one stage: int32 arrays that go up in one copy, always to the same addresses."""

    def __init__(self, size: int, device: torch.device) -> None:
        """`size`: most values of one copy, see `Upload.size`."""
        self._on_gpu = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=self._on_gpu)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._sent = torch.cuda.Event() if self._on_gpu else None

    def send(self, *arrays: NDArray[np.int32]) -> list[Tensor]:
        """Tensors of these shapes and values on the device. Equal shapes give equal addresses, so that a graph
        captured with them reads what is sent next."""
        if self._sent is not None:
            self._sent.synchronize()  # the copy before this one reads the same host memory
        host, views, end = self._host.numpy(), [], 0
        for array in arrays:
            start = end
            host[start : start + array.size] = array.reshape(-1)
            views.append(self._device[start : start + array.size].view(array.shape))
            end = start + -(-array.size // _ALIGN) * _ALIGN
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        return views

    @staticmethod
    def size(*shapes: Sequence[int]) -> int:
        """Values that arrays of these shapes take, the gaps that align them included."""
        return sum(-(-int(np.prod(shape)) // _ALIGN) * _ALIGN for shape in shapes)


class Download:
    """Results of one stage: int32 values that come back in one copy. `waits` counts how often the host waited."""

    def __init__(self, size: int, device: torch.device) -> None:
        """`size`: most values of one copy; the stage writes them to `on_device`."""
        self.on_device = torch.zeros(size, dtype=torch.int32, device=device)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.waits = 0

    def fetch(self, size: int) -> NDArray[np.int32]:
        """A copy of the first `size` values, once everything before on the stream is done."""
        self.waits += 1
        self._host[:size].copy_(self.on_device[:size], non_blocking=True)
        if self.on_device.is_cuda:
            torch.cuda.current_stream(self.on_device.device).synchronize()
        return self._host[:size].numpy().copy()


class Graphs:
    """Runs stages, on a GPU as CUDA graphs: one per key, captured at its first use.

    Work must read its inputs from, and write its results to, tensors that stay where they are. All graphs, also those
    of others that share with these, have one pool of memory: what is inside a pass may be overwritten by the next.
    """

    def __init__(self, device: torch.device, recorder: Recorder | None = None) -> None:
        """`recorder`: of the graphs to share memory with; None for memory of their own."""
        self._device = device
        self._graphs: dict[Hashable, Any] = {}
        self._recorder = recorder
        if device.type == "cuda" and recorder is None:
            self._recorder = Recorder()

    def sharing(self) -> Graphs:
        """Graphs with keys of their own in the same memory."""
        return Graphs(self._device, self._recorder)

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do `work`, which is the same for equal keys. What fails while it is captured is raised, and leaves the stream
        and the other graphs as they were."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        work()  # libraries set themselves up at the first call, which must not be captured; its results are the call's
        if self._recorder is not None:
            self._graphs[key] = self._recorder.record(work)

    def replay(self, key: Hashable) -> bool:
        """Whether the stage was captured; it is then put on the stream once more, with the inputs it had last. For
        measurements."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
        return graph is not None

    def clear(self) -> None:
        self._graphs.clear()


class Recorder:
    """Records work into CUDA graphs, which share one pool of memory.

    `torch.cuda.graph` would do, but it waits for the device and empties the allocator's cache before each graph, which
    is what a capture takes most of its time for, and stays on its stream when the end of a capture fails.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: Any = None  # one for all: memory of the pool belongs to the stream it was taken on

    def record(self, work: Callable[[], None]) -> Any:
        """A `torch.cuda.CUDAGraph` of the work, which is not done."""
        graph = torch.cuda.CUDAGraph()
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            # Other threads may use the device meanwhile: a server answers while an engine captures.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(Exception):  # its error would hide what went wrong
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph
