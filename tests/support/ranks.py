"""Engines of two ranks in one pair of processes: starting a process takes longer than most checks of an engine."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ddtree_trt.artifact.manifest import Manifest, load_manifest
from ddtree_trt.runtime.engines.torch.parallel.engine import ParallelEngine
from ddtree_trt.runtime.engines.torch.parallel.follower import HERE, Post, obey
from ddtree_trt.runtime.engines.torch.parallel.followers import Followers
from ddtree_trt.runtime.engines.torch.parallel.group import Group, Meeting
from ddtree_trt.runtime.engines.torch.parallel.part import open_part

CPU = torch.device("cpu")
RECORD = 1 << 14


class LastingGroup(Group):
    """A group that no engine leaves."""

    def leave(self) -> None:
        pass

    def disband(self) -> None:
        super().leave()


class LastingFollower(Followers):
    """The other process, which serves one engine after the other."""

    def __init__(self, meeting: Meeting) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(meeting, theirs), daemon=True)
        self.process.start()

    def ring(self) -> None:
        self.connection.send_bytes(b"")

    def lost(self) -> bool:
        return self.process.exitcode is not None

    def find_failure(self, patience_s: float = 0.0) -> str | None:
        return None

    def let_end(self) -> None:
        pass

    def join(self) -> None:
        pass

    def kill(self) -> None:
        pass


class TwoRanks:
    """This process as rank 0, and another one."""

    def __init__(self, folder: Path) -> None:
        meeting = Meeting(str(folder / "store"), 2)
        self._follower = LastingFollower(meeting)
        assert self._follower.connection.recv() == "here"
        self._group = LastingGroup(meeting, 0, CPU, RECORD)

    @contextmanager
    def open(self, directory: Path) -> Iterator[ParallelEngine]:
        """An engine directory over both."""
        manifest = load_manifest(directory)
        self._follower.connection.send((directory, manifest))
        engine = ParallelEngine(manifest, open_part(directory, manifest, CPU, self._group), self._group, self._follower)
        try:
            yield engine
        finally:
            engine.close()

    def close(self) -> None:
        self._follower.process.kill()
        self._follower.process.join()
        self._group.disband()


def hang(post: Post, rank_0: Connection) -> None:
    """In place of `follow`: a process that reports nothing."""
    rank_0.recv()


def hang_when_started(post: Post, rank_0: Connection) -> None:
    """In place of `follow`: a process that starts and does not meet the others."""
    rank_0.send(HERE)
    rank_0.recv()


def _serve(meeting: Meeting, rank_0: Connection) -> None:
    torch.set_num_threads(1)
    rank_0.send("here")
    group = LastingGroup(meeting, 1, CPU, RECORD)
    while True:
        directory, manifest = rank_0.recv()
        assert isinstance(manifest, Manifest)
        obey(open_part(directory, manifest, CPU, group), group, rank_0)
