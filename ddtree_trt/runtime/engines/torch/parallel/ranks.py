"""The processes of an engine over several ranks: how they meet, and how rank 0 starts, watches and ends the others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.errors import EngineError, UsageError, told
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.parallel.split import Shard, local_manifest
from ddtree_trt.runtime.engines.torch.weights import check_device, read_weights

TIMEOUT_S = 60.0  # how long a rank waits for the others in the middle of a pass
HERE, READY = "here", "ready"  # what a rank reports in this order; anything else is the text of its error
_NAME = "ddtree-rank-"
_REPORT_S = 5.0  # from a broken connection to what its cause is known by
_CLOSE_S = 10.0  # how long a rank may take to release its part
_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class RankConfig:
    """What a rank must know."""

    rank: int
    size: int
    store: str  # a file of torch's store, in a folder of this user's, by which the ranks meet
    device: str
    threads: int  # of a CPU
    directory: Path
    manifest: Manifest  # of the whole engine
    timeout_s: float = TIMEOUT_S


class Group(Shard):
    """This process among all ranks. Every method is called by all of them, in the same order."""

    def __init__(self, config: RankConfig) -> None:
        """Meet the other ranks, which must be there within the timeout.

        Makes the process's default group of torch.distributed, so there must be none.
        """
        super().__init__(config.rank, config.size)
        timeout, device = timedelta(seconds=config.timeout_s), torch.device(config.device)
        store = FileStore(config.store, config.size)
        store.set(f"rank {config.rank}", "here")
        # Before the group: one that could not be made keeps its number, and other processes know the next by another.
        store.wait([f"rank {each}" for each in range(config.size)], timeout)
        # Gloo's connections are not encrypted: it shall listen where this machine alone can reach it.
        chosen = {_INTERFACE: "lo"} if sys.platform == "linux" and _INTERFACE not in os.environ else {}
        os.environ.update(chosen)
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=config.rank,
                world_size=config.size,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )
        finally:
            for name in chosen:
                del os.environ[name]

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        found = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(found.unbind(0)), x.contiguous())
        return found

    def abort(self) -> None:
        """End what this process waits for on its GPU."""
        if (world := dist.group.WORLD) is not None:
            world.abort()

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def open_part(config: RankConfig, shard: Shard) -> TorchEngine:
    """Load this rank's part of an engine: of split weights, it alone is read. Raises ArtifactError as
    `TorchEngine.open` does."""
    device = torch.device(config.device)
    check_device(config.directory, config.manifest, device)
    weights = read_weights(config.directory, config.manifest, device, shard)
    return TorchEngine(local_manifest(config.manifest, shard), weights, device, shard)


def whole_rows(engine: TorchEngine, number: int) -> Tensor:
    """The logits of verdict `number` of the last pass over the whole vocabulary, float32 [R, V] on the device."""
    return engine.target.network.vocabulary.join(engine.target.read(number))


# A rank other than 0


def run_worker(config: RankConfig, rank_0: Connection) -> None:
    """Be a rank until rank 0 closes the engine or its process ends. `rank_0` gives the calls, and takes HERE, READY and
    the text of an error, which ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which closes the engine
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    try:
        if config.device == "cpu":
            torch.set_num_threads(config.threads)
        else:
            torch.cuda.set_device(torch.device(config.device))
        rank_0.send(HERE)
        group = Group(config)
        engine = open_part(config, group)
        rank_0.send(READY)
        worker_loop(engine, rank_0)
        group.leave()
    except BaseException as error:
        rank_0.send(told(error))
        raise SystemExit(1) from error


def _end_with_rank_0() -> None:
    """End this process, whatever it waits for, when rank 0's has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "rank 0 starts the others"
    parent.join()
    os._exit(1)


def worker_loop(engine: TorchEngine, rank_0: Connection) -> None:
    """Do this rank's part of rank 0's calls, until it closes the engine."""
    function = None
    while function is not TorchEngine.close:
        function, arguments = rank_0.recv()
        function(engine, *arguments)


# What rank 0 has of the others


class Workers:
    """One process per rank from 1 on, the first of each list is rank 1's."""

    def __init__(self, configs: Sequence[RankConfig], opening_s: float) -> None:
        """Start them; within `opening_s` seconds they must have sent all reports that are expected.

        Raises UsageError in a process that is itself being started as one: the script that it imports opens an engine.
        """
        if multiprocessing.current_process().name.startswith(_NAME):
            raise UsageError(
                "the other ranks of an engine import the script that opens it: put what the script runs under "
                'if __name__ == "__main__":'
            )
        self._size = 1 + len(configs)
        self.closing = False  # whether ranks that end were told to
        self._opening_s, self._deadline = opening_s, time.monotonic() + opening_s
        self.processes: list[Any] = []
        self._connections: list[Connection] = []
        self._reports: list[list[str]] = [[] for _ in configs]
        context = multiprocessing.get_context("spawn")
        try:
            for config in configs:
                ours, theirs = context.Pipe()
                name = f"{_NAME}{config.rank}"
                process = context.Process(target=run_worker, args=(config, theirs), name=name, daemon=True)
                process.start()
                theirs.close()  # so that only the other process has it
                self.processes.append(process)
                self._connections.append(ours)
        except BaseException:
            self.kill()
            raise

    def expect(self, report: str) -> None:
        """Wait until every rank has sent this report. Raises EngineError where one has failed instead, or has sent
        nothing when the time for opening is over."""
        waiting = dict(zip(self._connections, range(len(self.processes)), strict=True))
        while waiting:
            found = wait(list(waiting), max(self._deadline - time.monotonic(), 0))
            if not found:
                names = ", ".join(f"{self._name(i)} (process {self.processes[i].pid})" for i in waiting.values())
                raise EngineError(f"{names} did not report {report!r} within {self._opening_s:g} s")
            for connection in [each for each in waiting if each in found]:
                number = waiting.pop(connection)
                self._read(number)
                if report not in self._reports[number]:
                    raise EngineError(self.find_failure() or f"{self._name(number)} has ended")

    def send(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Have every rank call a function of its engine. Raises OSError where one has ended."""
        call = ForkingPickler.dumps((function, arguments))
        for connection in self._connections:
            connection.send_bytes(call)

    def lost(self) -> bool:
        """Whether a rank has ended that was not told to."""
        return not self.closing and any(process.exitcode is not None for process in self.processes)

    def find_failure(self, patience_s: float = _REPORT_S) -> str | None:
        """How ranks failed, as far as they say within that time; None where all still run."""
        deadline = time.monotonic() + patience_s
        while True:
            if found := [text for number in range(len(self.processes)) if (text := self._failure(number))]:
                return "; ".join(found)
            if not wait([p.sentinel for p in self.processes], max(deadline - time.monotonic(), 0)):
                return None

    def watch(self, on_end: Callable[[], None]) -> None:
        """Call `on_end`, in a thread, when a rank ends that was not told to."""

        def work() -> None:
            wait([process.sentinel for process in self.processes])
            if not self.closing:
                on_end()

        threading.Thread(target=work, name="ddtree-ranks", daemon=True).start()

    def join(self) -> None:
        """Wait for the end of ranks that were told to, and end those that take too long."""
        for process in self.processes:
            process.join(_CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """End all ranks now."""
        self.closing = True
        for process, connection in zip(self.processes, self._connections, strict=True):
            process.kill()
            process.join()
            connection.close()

    def _name(self, number: int) -> str:
        return f"rank {1 + number} of {self._size}"

    def _read(self, number: int) -> None:
        """Take in what a rank has reported."""
        with contextlib.suppress(EOFError, OSError):
            while self._connections[number].poll():
                self._reports[number].append(self._connections[number].recv())

    def _failure(self, number: int) -> str | None:
        """How a rank failed: the text that it reported, or else how its process ended; None where it runs."""
        self._read(number)
        reports, code = self._reports[number], self.processes[number].exitcode
        if reports and reports[-1] not in (HERE, READY):
            return f"{self._name(number)} failed: {reports[-1]}"
        if code is None:
            return None
        if code < 0:
            return f"{self._name(number)} was ended by {signal.Signals(-code).name}"
        early = ' before it began: a script that opens such an engine must do so under if __name__ == "__main__":'
        return f"{self._name(number)} ended with exit code {code}{'' if reports else early}"
