"""The processes of an engine over several ranks: how they meet, and how rank 0 starts, watches and ends the others."""

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
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.errors import EngineError, told
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.parallel.split import Shard, local_manifest
from ddtree_trt.runtime.engines.torch.weights import check_device, read_weights

TIMEOUT_S = 60.0  # how long a rank waits for the others in the middle of a pass
HERE, READY = "here", "ready"  # what a rank reports in this order; anything else says how it failed
_REPORT_S = 2.0  # from a broken connection to what its cause is known by
_CLOSE_S = 10.0  # how long a rank may take to release its part
_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class RankConfig:
    """What a rank must know."""

    rank: int
    size: int
    store: str  # a file of torch's store, in a folder of this user's, by which the ranks meet
    device: torch.device
    threads: int  # of a CPU
    directory: Path
    manifest: Manifest  # of the whole engine
    timeout_s: float = TIMEOUT_S


class Group(Shard):
    """This process among all ranks. Every method is called by all of them, in the same order."""

    def __init__(self, config: RankConfig) -> None:
        """Meet the other ranks within the timeout, in the process's default group of torch.distributed."""
        super().__init__(config.rank, config.size)
        timeout, device = timedelta(seconds=config.timeout_s), config.device
        store = FileStore(config.store, config.size)
        store.set(f"rank {config.rank}", "here")
        # Before the group: one that could not be made keeps its number, and other processes know the next by another.
        store.wait([f"rank {each}" for each in range(config.size)], timeout)
        # Gloo's connections are not encrypted: it shall listen where this machine alone can reach it.
        chosen = {_INTERFACE: "lo"} if sys.platform == "linux" and _INTERFACE not in os.environ else {}
        os.environ.update(chosen)
        gpu = device if device.type == "cuda" else None
        try:
            ranks: dict[str, Any] = {"rank": config.rank, "world_size": config.size}
            dist.init_process_group("nccl" if gpu else "gloo", store=store, timeout=timeout, device_id=gpu, **ranks)
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
    """Load this rank's part of an engine. Raises ArtifactError as `TorchEngine.open` does."""
    check_device(config.directory, config.manifest, config.device)
    weights = read_weights(config.directory, config.manifest, config.device, shard)
    return TorchEngine(local_manifest(config.manifest, shard), weights, config.device, shard)


def whole_rows(engine: TorchEngine, number: int) -> Tensor:
    """The logits of verdict `number` of the last pass over the whole vocabulary, float32 [R, V] on the device."""
    return engine.target.network.vocabulary.join(engine.target.read(number))


# A rank other than 0


def run_worker(config: RankConfig, rank_0: Connection) -> None:
    """Be a rank until rank 0 closes the engine or its process ends. `rank_0` gives the calls, and takes reports."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which closes the engine
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    try:
        if config.device.type == "cpu":
            torch.set_num_threads(config.threads)
        else:
            torch.cuda.set_device(config.device)
        rank_0.send(HERE)
        group = Group(config)
        engine = open_part(config, group)
        rank_0.send(READY)
        worker_loop(engine, rank_0)
        group.leave()
    except BaseException as error:
        with contextlib.suppress(OSError):  # where rank 0's process has ended
            rank_0.send(f"failed: {told(error)}")
        raise SystemExit(1) from error


def _end_with_rank_0() -> None:
    """End this process, whatever it waits for, when rank 0's has ended: a kernel on a GPU may wait without an end."""
    if parent := multiprocessing.parent_process():
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

    def __init__(self, configs: Sequence[RankConfig], folder: TemporaryDirectory[str]) -> None:
        """Start them. `folder`, which has the store of the configs, is removed with them."""
        self._folder = folder
        self._size = 1 + len(configs)
        self._closing = False
        self.processes: list[Any] = []
        self._connections: list[Connection] = []
        context = multiprocessing.get_context("spawn")
        for config in configs:
            ours, theirs = context.Pipe()
            process = context.Process(target=run_worker, args=(config, theirs), daemon=True)
            process.start()
            theirs.close()  # so that only the other process has it
            self.processes.append(process)
            self._connections.append(ours)

    def expect(self, report: str, deadline: float) -> None:
        """Wait until every rank has sent this report. Raises EngineError where one has failed instead, or has sent
        nothing by then, a time of `time.monotonic`."""
        for number, connection in enumerate(self._connections):
            if not connection.poll(max(deadline - time.monotonic(), 0)):
                raise EngineError(f"{self._name(number)} did not report {report!r} in time")
            if (said := self._read(number)) != report:
                raise EngineError(f"{self._name(number)} {said}")

    def send(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Have every rank call it with its engine. Raises OSError where one has ended."""
        call = ForkingPickler.dumps((function, arguments))
        for connection in self._connections:
            connection.send_bytes(call)

    def lost(self) -> bool:
        return any(process.exitcode is not None for process in self.processes)

    def find_failure(self) -> str | None:
        """How ranks failed, as far as they say within a few seconds; None where all still run."""
        found = wait(self._connections, _REPORT_S)
        said = {number: self._read(number) for number, each in enumerate(self._connections) if each in found}
        return "; ".join(f"{self._name(n)} {text}" for n, text in said.items() if text not in (HERE, READY)) or None

    def watch(self, on_end: Callable[[], None]) -> None:
        """Call `on_end`, in a thread, when a rank ends that was not told to."""

        def work() -> None:
            wait([process.sentinel for process in self.processes])
            if not self._closing:
                on_end()

        threading.Thread(target=work, name="ddtree-ranks", daemon=True).start()

    def close(self) -> None:
        """Have the ranks close their engines, and end those that take too long."""
        self._closing = True
        with contextlib.suppress(OSError):  # of a rank that has ended
            self.send(TorchEngine.close, ())
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
        self._folder.cleanup()

    def _name(self, number: int) -> str:
        return f"rank {1 + number} of {self._size}"

    def _read(self, number: int) -> str:
        """What a rank reports next: waits for it, or else for the end of its process and says how that was."""
        try:
            return str(self._connections[number].recv())
        except (EOFError, OSError):
            process = self.processes[number]
            process.join(_REPORT_S)
            code = process.exitcode
            return f"was ended by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
