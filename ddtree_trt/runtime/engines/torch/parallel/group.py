"""The ranks' process groups: NCCL between GPUs or gloo between CPUs for the networks, and gloo for control data."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from ddtree_trt.runtime.engines.torch.parallel.shard import Shard

TIMEOUT_S = 60.0  # how long a rank waits for the others in the middle of a pass
_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Meeting:
    """Where and how the ranks of an engine meet."""

    file: str  # of torch's file store, in a folder of this user's
    size: int
    timeout_s: float = TIMEOUT_S


class Group(Shard):
    """This process among all ranks. Every method is called by all of them, in the same order."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device, record: int) -> None:
        """Meet the other ranks, which must be there within the timeout. `record`: values of a control record.

        Makes the process's default group of torch.distributed, so there must be none.
        """
        super().__init__(rank, meeting.size)
        self.timeout_s = meeting.timeout_s
        self._timeout = timedelta(seconds=meeting.timeout_s)
        on_gpu = device.type == "cuda"
        store, *_ = next(rendezvous(f"file://{meeting.file}", rank, meeting.size))
        store.set(f"rank {rank}", "here")
        # Before the group: one that could not be made keeps its number, and other processes know the next by another.
        store.wait([f"rank {each}" for each in range(meeting.size)], self._timeout)
        with _on_loopback():
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=store,
                rank=rank,
                world_size=meeting.size,
                timeout=self._timeout,
                device_id=device if on_gpu else None,
            )
            # The host reads control data: it does not pass through a GPU.
            try:
                self._control = dist.new_group(backend="gloo", timeout=self._timeout) if on_gpu else None
            except BaseException:
                dist.destroy_process_group()  # nothing else could: there is no group to leave
                raise
        self._record = torch.zeros(record, dtype=torch.int32)

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        found = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(found.unbind(0)), x.contiguous())
        return found

    def send(self, values: NDArray[np.int32]) -> None:
        """Rank 0: give every other rank `values`, at most a record of them, in a broadcast of a whole record."""
        self._record.numpy()[: len(values)] = values
        self._broadcast()

    def receive(self) -> NDArray[np.int32]:
        """The other ranks: rank 0's record, in memory that the next one overwrites."""
        self._broadcast()
        values: NDArray[np.int32] = self._record.numpy()
        return values

    def abort(self) -> None:
        """End what this process waits for on its GPU."""
        if (world := dist.group.WORLD) is not None:
            world.abort()

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _broadcast(self) -> None:
        work = dist.broadcast(self._record, 0, group=self._control, async_op=True)
        assert work is not None, "this process is in the group"
        work.wait(self._timeout)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Have gloo, whose connections are not encrypted, listen where this machine alone can reach it."""
    if sys.platform != "linux" or _INTERFACE in os.environ:
        yield
        return
    os.environ[_INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[_INTERFACE]
