"""Copies between host and device, one upload and one download per stage, and stages captured as CUDA graphs. On a CPU
the same objects are plain memory and plain calls."""

import contextlib
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGN = 4  # int32 values: the kernels ask for multiples of 16 bytes


class Upload:
    """Control data of one stage: int32 arrays that are uploaded in one copy, always to the same addresses."""

    def __init__(self, device: torch.device, *shapes: Sequence[int]) -> None:
        """`shapes`: of the largest arrays of one copy, each of which begins at an aligned address."""
        size = sum(-(-math.prod(shape) // _ALIGN) * _ALIGN for shape in shapes)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def send(self, *arrays: NDArray[np.int32]) -> list[Tensor]:
        """Tensors of these shapes and values on the device. Equal shapes give equal addresses, so that a graph captured
        with them reads the values of the latest call."""
        if self._sent is not None:
            self._sent.synchronize()  # the previous copy reads the same host memory
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


class Download:
    """Results of one stage: int32 values that are downloaded in one copy, for which the host waits."""

    def __init__(self, size: int, device: torch.device) -> None:
        """`size`: most values of one copy; the stage writes them to `on_device`."""
        self.on_device = torch.zeros(size, dtype=torch.int32, device=device)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")

    def fetch(self, size: int) -> NDArray[np.int32]:
        """A copy of the first `size` values, made after all earlier work on the stream."""
        self._host[:size].copy_(self.on_device[:size], non_blocking=True)
        if self.on_device.is_cuda:
            torch.cuda.current_stream(self.on_device.device).synchronize()
        return self._host[:size].numpy().copy()


class Graphs:
    """Runs the stages of an engine, on a GPU as CUDA graphs: one per key, captured at its first use. Inputs and results
    are at fixed addresses; all graphs use one pool, so that a pass may overwrite intermediate tensors of another."""

    def __init__(self, device: torch.device, *, capture: bool = True) -> None:
        """`capture`: False runs all work as on a CPU."""
        self._captures = device.type == "cuda" and capture
        self._graphs: dict[Hashable, Any] = {}
        self._pool: Any = None
        self._stream: Any = None  # one for all graphs: memory of the pool belongs to the stream it was allocated on

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Run `work`, the same for equal keys. A capture that fails leaves the stream and other graphs as they were."""
        if key in self._graphs:
            self._graphs[key].replay()
            return
        work()  # libraries initialise themselves in the first call, which cannot be captured; it gives the results
        if self._captures:
            self._graphs[key] = self._record(work)

    def _record(self, work: Callable[[], None]) -> Any:
        """A `torch.cuda.CUDAGraph` of the work, which is captured and not run. `torch.cuda.graph` waits and empties the
        allocator's cache before each, and does not leave its stream when the end of a capture fails."""
        graph = torch.cuda.CUDAGraph()
        if self._stream is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            # Other threads may use the device meanwhile: a server answers while an engine captures.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(Exception):  # its error would hide the first one
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph
