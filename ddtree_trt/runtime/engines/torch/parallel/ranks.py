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
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.errors import EngineError, UsageError, shown, told
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.parallel.split import Shard, local_manifest
from ddtree_trt.runtime.engines.torch.weights import check_device, read_weights

EngineCall = tuple[Callable[..., Any], tuple[Any, ...]]  # a function of a rank's engine, and what follows the engine

TIMEOUT_S = 60.0  # how long a rank waits for the others in the middle of a pass
OPENING = "DDTREE_OPENING_SECONDS"  # environment: how long the other ranks may take to open an engine
HERE, READY = "here", "ready"  # what a rank reports in this order; anything else is the text of its error
_NAME = "ddtree-rank-"
_MOST_S = 1e6  # days; the system's calls that wait take little more
_REPORT_S = 5.0  # from a broken connection to what its cause is known by
_CLOSE_S = 10.0  # how long a rank may take to release its part
_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Rendezvous:
    """Where and how the ranks of an engine meet."""

    file: str  # of torch's file store, in a folder of this user's
    size: int
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True)
class RankConfig:
    """What a rank other than 0 must know."""

    rank: int
    rendezvous: Rendezvous
    directory: Path
    manifest: Manifest  # of the whole engine
    device: str
    threads: int  # of a CPU


class Group(Shard):
    """This process among all ranks. Every method is called by all of them, in the same order."""

    def __init__(self, rendezvous: Rendezvous, rank: int, device: torch.device) -> None:
        """Meet the other ranks, which must be there within the timeout.

        Makes the process's default group of torch.distributed, so there must be none.
        """
        super().__init__(rank, rendezvous.size)
        self.timeout_s = rendezvous.timeout_s
        timeout, on_gpu = timedelta(seconds=rendezvous.timeout_s), device.type == "cuda"
        store = FileStore(rendezvous.file, rendezvous.size)
        store.set(f"rank {rank}", "here")
        # Before the group: one that could not be made keeps its number, and other processes know the next by another.
        store.wait([f"rank {each}" for each in range(rendezvous.size)], timeout)
        # Gloo's connections are not encrypted: it shall listen where this machine alone can reach it.
        chosen = {_INTERFACE: "lo"} if sys.platform == "linux" and _INTERFACE not in os.environ else {}
        os.environ.update(chosen)
        try:
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=store,
                rank=rank,
                world_size=rendezvous.size,
                timeout=timeout,
                device_id=device if on_gpu else None,
            )
            try:
                # The host reads calls: they do not pass through a GPU.
                self._calls = dist.new_group(backend="gloo", timeout=timeout) if on_gpu else None
            except BaseException:
                dist.destroy_process_group()  # nothing else could: there is no group to leave
                raise
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

    def exchange(self, calls: Sequence[EngineCall]) -> Sequence[EngineCall]:
        """The calls that rank 0 gives; those of other ranks are not looked at."""
        box = [calls]
        dist.broadcast_object_list(box, 0, group=self._calls)
        return box[0]

    def abort(self) -> None:
        """End what this process waits for on its GPU."""
        if (world := dist.group.WORLD) is not None:
            world.abort()

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def open_part(directory: Path, manifest: Manifest, device: torch.device, shard: Shard) -> TorchEngine:
    """Load this rank's part of an engine: of split weights, it alone is read. Raises ArtifactError as
    `TorchEngine.open` does."""
    check_device(directory, manifest, device)
    weights = read_weights(directory, manifest, device, shard)
    return TorchEngine(local_manifest(manifest, shard), weights, device, shard)


def whole_rows(engine: TorchEngine, number: int) -> Tensor:
    """The logits of verdict `number` of the last pass over the whole vocabulary, float32 [R, V] on the device."""
    return engine.target.network.vocabulary.join(engine.target.last_logits[number])


# A rank other than 0


def run_worker(config: RankConfig, rank_0: Connection) -> None:
    """Be a rank until rank 0 closes the engine or its process ends. `rank_0` takes HERE, READY and the text of an
    error, which ends this process, and has a message before the calls."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which closes the engine
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    try:
        device = torch.device(config.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(config.threads)
        rank_0.send(HERE)
        group = Group(config.rendezvous, config.rank, device)
        engine = open_part(config.directory, config.manifest, device, group)
        rank_0.send(READY)
        worker_loop(engine, group, rank_0)
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


def worker_loop(engine: TorchEngine, group: Group, rank_0: Connection) -> None:
    """Do this rank's part of rank 0's calls, until it closes the engine."""
    while True:
        rank_0.recv_bytes()  # without a time limit: rank 0 may be idle
        for function, arguments in group.exchange([]):
            function(engine, *arguments)
            if function is TorchEngine.close:
                return


# What rank 0 has of the others


def opening_limit_s(weight_bytes: int) -> float:
    """Seconds that ranks may take from their start until they have opened an engine with so many bytes of weights: by
    default ten minutes and what a disk of 50 MB/s takes. Raises UsageError where the environment's number is none."""
    text = os.environ.get(OPENING, "")
    with contextlib.suppress(ValueError):
        seconds = float(text) if text else 600 + weight_bytes / 50e6
        if 0 < seconds <= _MOST_S:
            return seconds
    raise UsageError(
        f"the environment variable {OPENING} must be a number of seconds above 0, at most {_MOST_S:.0f}, "
        f"not {shown(text)}"
    )


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
        self._closing = False
        self._opening_s, self._deadline = opening_s, time.monotonic() + opening_s
        self.processes: list[SpawnProcess] = []
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
        refusal = f"an engine of {self._size} ranks could not be opened"
        waiting = dict(zip(self._connections, range(len(self.processes)), strict=True))
        while waiting:
            found = wait(list(waiting), max(self._deadline - time.monotonic(), 0))
            if not found:
                names = ", ".join(f"{self._name(i)} (process {self.processes[i].pid})" for i in waiting.values())
                raise EngineError(
                    f"{refusal}: {names} did not report {report!r} within {self._opening_s:g} s; if it is only slow, "
                    f"set {OPENING} to more seconds"
                )
            for connection in [each for each in waiting if each in found]:
                number = waiting.pop(connection)
                self._read(number)
                if report not in self._reports[number]:
                    raise EngineError(f"{refusal}: {self.find_failure() or self._name(number) + ' has ended'}")

    def ring(self) -> None:
        """Tell every rank that calls follow. Raises OSError where one has ended."""
        for connection in self._connections:
            connection.send_bytes(b"")

    def lost(self) -> bool:
        """Whether a rank has ended that was not told to."""
        return not self._closing and any(process.exitcode is not None for process in self.processes)

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
            if not self._closing:
                on_end()

        threading.Thread(target=work, name="ddtree-ranks", daemon=True).start()

    def let_end(self) -> None:
        """Ranks that end from now on were told to."""
        self._closing = True

    def join(self) -> None:
        """Wait for the end of ranks that were told to, and end those that take too long."""
        for process in self.processes:
            process.join(_CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """End all ranks now."""
        self._closing = True
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
