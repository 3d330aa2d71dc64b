"""Engines of two ranks in one pair of processes: starting a process takes longer than most checks of an engine."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.runtime.engines.torch.parallel.engine import ParallelEngine
from ddtree_trt.runtime.engines.torch.parallel.ranks import (
    HERE,
    Group,
    RankConfig,
    Rendezvous,
    Workers,
    open_part,
    worker_loop,
)

CPU = torch.device("cpu")


class LastingGroup(Group):
    """A group that no engine leaves."""

    def leave(self) -> None:
        pass


class LastingWorker(Workers):
    """The other process, which serves one engine after the other."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(rendezvous, theirs), daemon=True)
        self.process.start()

    def ring(self) -> None:
        self.connection.send_bytes(b"")

    def lost(self) -> bool:
        return self.process.exitcode is not None

    def find_failure(self, patience_s: float = 0.0) -> str | None:
        return None

    def join(self) -> None:
        pass

    kill = join


class TwoRanks:
    """This process as rank 0, and another one."""

    def __init__(self, folder: Path) -> None:
        rendezvous = Rendezvous(str(folder / "store"), 2)
        self._worker = LastingWorker(rendezvous)
        assert self._worker.connection.recv() == HERE
        self._group = LastingGroup(rendezvous, 0, CPU)

    @contextmanager
    def open(self, directory: Path) -> Iterator[ParallelEngine]:
        """An engine directory over both."""
        self._worker.connection.send(directory)
        manifest = load_manifest(directory)
        engine = ParallelEngine(manifest, open_part(directory, manifest, CPU, self._group), self._group, self._worker)
        try:
            yield engine
        finally:
            engine.close()

    def close(self) -> None:
        self._worker.process.kill()
        self._worker.process.join()
        Group.leave(self._group)


def hang(config: RankConfig, rank_0: Connection) -> None:
    """In place of `run_worker`: a process that reports nothing."""
    rank_0.recv()


def hang_when_started(config: RankConfig, rank_0: Connection) -> None:
    """In place of `run_worker`: a process that starts and does not meet the others."""
    rank_0.send(HERE)
    rank_0.recv()


def _serve(rendezvous: Rendezvous, rank_0: Connection) -> None:
    torch.set_num_threads(1)
    rank_0.send(HERE)
    group = LastingGroup(rendezvous, 1, CPU)
    while True:
        directory = rank_0.recv()
        worker_loop(open_part(directory, load_manifest(directory), CPU, group), group, rank_0)
