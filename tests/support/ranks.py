"""Engines of two ranks in one pair of processes: starting a process takes longer than most checks of an engine."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch

from ddtree_trt.artifact.manifest import Manifest, load_manifest
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.parallel.engine import ParallelEngine
from ddtree_trt.runtime.engines.torch.parallel.ranks import HERE, Group, RankConfig, Workers, open_part, worker_loop


def config_of(rank: int, store: str, directory: Path, manifest: Manifest) -> RankConfig:
    return RankConfig(rank, 2, store, torch.device("cpu"), 1, directory, manifest)


class LastingGroup(Group):
    """A group that no engine leaves."""

    def leave(self) -> None:
        pass


class LastingWorker(Workers):
    """The other process, which serves one engine after the other."""

    def __init__(self, store: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(store, theirs), daemon=True)
        self.process.start()

    def send(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.connection.send((function, arguments))

    def lost(self) -> bool:
        return self.process.exitcode is not None

    def find_failure(self) -> str | None:
        return None

    def close(self) -> None:
        self.send(TorchEngine.close, ())

    def kill(self) -> None:
        pass


class TwoRanks:
    """This process as rank 0, and another one."""

    def __init__(self, folder: Path) -> None:
        self._store = str(folder / "store")
        self._worker = LastingWorker(self._store)
        assert self._worker.connection.recv() == HERE
        self._group = LastingGroup(config_of(0, self._store, folder, cast(Any, None)))

    @contextmanager
    def open(self, directory: Path) -> Iterator[ParallelEngine]:
        """An engine directory over both."""
        self._worker.connection.send(directory)
        config = config_of(0, self._store, directory, load_manifest(directory))
        engine = ParallelEngine(config, open_part(config, self._group), self._group, self._worker)
        try:
            yield engine
        finally:
            engine.close()

    def close(self) -> None:
        self._worker.process.kill()
        self._worker.process.join()
        Group.leave(self._group)


def _serve(store: str, rank_0: Connection) -> None:
    torch.set_num_threads(1)
    rank_0.send(HERE)
    group = LastingGroup(config_of(1, store, Path(), cast(Any, None)))
    while True:
        directory = rank_0.recv()
        worker_loop(open_part(config_of(1, store, directory, load_manifest(directory)), group), rank_0)
