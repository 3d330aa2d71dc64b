"""The engine of several ranks, as rank 0 has it, which runs the decode loop: all of them do every call, a function of a
rank's engine and its arguments, each over its part of the target."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from numpy.typing import NDArray

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.artifact.toolchain import RANKS
from ddtree_trt.device.cpu import SINGLE_THREAD_BYTES
from ddtree_trt.errors import EngineError, UsageError, told
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, Engine, LogitRows, Verdict, VerifyRequest, no_draw
from ddtree_trt.runtime.engines.drafters import SlotCalls
from ddtree_trt.runtime.engines.passes import LazyRows, make_single_passes
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.parallel.ranks import (
    HERE,
    READY,
    TIMEOUT_S,
    Group,
    RankConfig,
    Workers,
    open_part,
    whole_rows,
)
from ddtree_trt.runtime.engines.torch.parallel.split import check_split
from ddtree_trt.runtime.engines.torch.weights import choose_device
from ddtree_trt.runtime.options import SPLIT, EngineOptions

# How long ranks may take from their start until they have opened an engine, and what a slow disk reads of it meanwhile.
OPENING_S, DISK_BYTES_PER_S = 600.0, 50e6


def open_torch(directory: Path, manifest: Manifest, options: EngineOptions) -> Engine:
    """The engine of a directory whose digests were checked, over as many ranks as the options say."""
    engine = TorchEngine if options.ranks == 1 else ParallelEngine
    return engine.open(directory, manifest, options)


class ParallelEngine(SlotCalls):
    """The `Engine` protocol over all ranks. One thread calls it. A rank that fails or takes too long ends the engine:
    that call and all later ones raise EngineError. Ctrl-C waits for the end of a pass, and the engine goes on."""

    mixes = False
    rounds = None  # rounds on the device have no host that could lead other ranks

    def __init__(self, config: RankConfig, engine: TorchEngine, group: Group, workers: Workers) -> None:
        """`engine` is the part of rank 0, whose `config` it is."""
        # Latencies depend on the number of ranks: the toolchain is a part of the latency profile's fingerprint.
        toolchain = {**engine.manifest.toolchain, RANKS: str(group.size)}
        self.manifest = replace(config.manifest, toolchain=toolchain)
        self.threads, self.inexact = engine.threads, engine.inexact
        self._engine, self._group, self._workers = engine, group, workers
        self.target, self.drafter, self.buckets = engine.target, engine.drafter, engine.buckets
        self._failure: str | None = None
        if engine.device.type == "cuda":  # gloo notices by itself
            workers.watch(group.abort)

    @classmethod
    def open(
        cls, directory: Path, manifest: Manifest, options: EngineOptions, *, timeout_s: float = TIMEOUT_S
    ) -> ParallelEngine:
        """Load an engine directory whose digests were checked, over this process and others that it starts, each with a
        GPU or some of the processor's threads. Raises UsageError for an engine that cannot be split so, too few GPUs,
        or a process that has a process group already, EngineError for ranks that fail or take too long, and what
        `TorchEngine.open` raises."""
        size, threads = options.ranks, options.threads
        check_split(manifest, size)
        weight_bytes, devices = manifest.files[artifact.TORCH_WEIGHTS].size, _devices(size)
        if torch.distributed.is_initialized():
            raise UsageError(
                "this process is in a process group of torch.distributed already, another tensor-parallel engine's or "
                "its own; close that first"
            )
        if devices[0].type == "cpu":
            small = weight_bytes < SINGLE_THREAD_BYTES
            threads = threads or (1 if small else max(torch.get_num_threads() // size, 1))
            torch.set_num_threads(threads)
        deadline = time.monotonic() + OPENING_S + weight_bytes / DISK_BYTES_PER_S
        folder = tempfile.TemporaryDirectory(prefix="ddtree-ranks-")
        first, *others = (
            RankConfig(rank, size, f"{folder.name}/store", device, threads, directory, manifest, timeout_s)
            for rank, device in enumerate(devices)
        )
        workers, group = Workers(others, folder), None
        try:
            workers.expect(HERE, deadline)  # starting processes takes longer than the timeout of a group may be
            group = Group(first)
            engine = open_part(first, group)
            workers.expect(READY, deadline)
        except BaseException as error:
            cause = _cause(error, workers, size)
            workers.kill()
            if group is not None:
                group.leave()
            if isinstance(error, (EngineError, RuntimeError)):
                raise EngineError(f"an engine of {size} ranks could not be opened: {cause}") from error
            raise
        return cls(first, engine, group, workers)

    def truncate(self, slot: int, length: int) -> None:
        self._call(TorchEngine.truncate, slot, length)

    def prefill(self, slot: int, token_ids: NDArray[Any], *, rows: LogitRows, taps: bool) -> Verdict:
        prefill = partial(TorchEngine.prefill, rows=rows, taps=taps)
        return self._whole(self._call(prefill, slot, token_ids), 0)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        found: list[Draft] = self._call(TorchEngine.draft, [replace(r, draw=no_draw) for r in requests])
        return found

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        verdicts = self._call(TorchEngine.verify, requests)
        return [self._whole(verdict, number) for number, verdict in enumerate(verdicts)]

    def commit(self, slot: int, path: NDArray[Any], *, taps: bool) -> None:
        self._call(partial(TorchEngine.commit, taps=taps), slot, path)

    def warm_up(self, progress: Progress = no_progress) -> None:
        """On GPUs: run a prompt's chunk and two trees, so that libraries are initialised. Nothing is captured."""
        if self._engine.device.type == "cuda":
            make_single_passes(self, [1, 1 + self.manifest.limits.max_tree_budget], None, progress)

    def synchronize(self) -> None:
        self._engine.synchronize()

    def close(self) -> None:
        """Release the memory of all ranks and end their processes."""
        if self._failure is None:
            self._workers.close()
            self._end("it was closed")
        self._engine.close()
        self.release()

    def _whole(self, verdict: Verdict, number: int) -> Verdict:
        """The verdict of that number in its pass, with whole rows of logits, gathered when one is read."""
        gathered = cache(lambda: self._call(whole_rows, number))

        def fetch(start: int, stop: int, columns: slice) -> NDArray[Any]:
            rows: NDArray[Any] = gathered()[start:stop, columns].cpu().numpy()
            return rows

        rows = LazyRows(len(verdict.logits), self.manifest.target_dims.vocab_size, fetch)
        return Verdict(verdict.choices, rows)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Have all ranks do a call; returns this rank's result. After an error the ranks are out of step, so that it
        ends the engine. Raises EngineError, also where it had ended before."""
        if self._failure is not None:
            raise EngineError(self._failure)
        with _interrupts_deferred():
            try:
                self._workers.send(function, arguments)
                found = function(self._engine, *arguments)
                if self._workers.lost():  # the wait of a GPU has no error when the group was aborted
                    raise RuntimeError("a rank has ended")
            except Exception as error:
                self._end(_cause(error, self._workers, self._group.size))
                raise EngineError(self._failure) from error
        return found

    def _end(self, reason: str) -> None:
        self._failure = f"the engine of {self._group.size} ranks has ended: {reason}; open it again"
        self._workers.kill()
        self._group.leave()


def _cause(error: BaseException, workers: Workers, size: int) -> str:
    """What has ended an engine in which rank 0 had this error: other ranks may say why."""
    other = workers.find_failure() if isinstance(error, (RuntimeError, OSError)) else None
    return other or (str(error) if isinstance(error, EngineError) else f"rank 0 of {size} failed: {told(error)}")


def _devices(size: int) -> list[torch.device]:
    """The devices of the ranks, the current GPU first, or the CPU. Raises UsageError for too few GPUs."""
    first = choose_device()
    if first.type == "cpu":
        return [first] * size
    count = torch.cuda.device_count()
    if count < size:
        raise UsageError(f"{SPLIT} {size} needs as many GPUs, this process sees {count}; lower it")
    others = [i for i in range(count) if i != first.index]
    return [first, *(torch.device("cuda", i) for i in others[: size - 1])]


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Handle a Ctrl-C in the main thread at the end of the block, when no rank waits in a pass."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    seen: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if seen:
            handler(signal.SIGINT, seen[0])
