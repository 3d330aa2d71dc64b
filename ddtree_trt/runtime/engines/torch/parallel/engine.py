"""The engine of several ranks, as rank 0 has it: every call is executed by all of them.

Rank 0 runs the decode loop. A call's arguments go to the other ranks as one record of control data (`control.py`), then
all ranks run the same passes, each over its part of the target.
"""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.artifact.toolchain import RANKS
from ddtree_trt.device.cpu import SINGLE_THREAD_BYTES
from ddtree_trt.errors import EngineError, UsageError
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, Engine, LogitRows, Verdict, VerifyRequest
from ddtree_trt.runtime.engines.lazy_rows import LazyRows
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.parallel.control import (
    ROWS,
    Call,
    Outbox,
    draft_values,
    record_size,
    refuse_to_draw,
    verify_values,
)
from ddtree_trt.runtime.engines.torch.parallel.follower import HERE, READY, Post
from ddtree_trt.runtime.engines.torch.parallel.followers import Followers, opening_limit_s
from ddtree_trt.runtime.engines.torch.parallel.group import TIMEOUT_S, Group, Meeting
from ddtree_trt.runtime.engines.torch.parallel.part import open_part, whole_rows
from ddtree_trt.runtime.engines.torch.parallel.split import check_split
from ddtree_trt.runtime.engines.torch.weights import choose_device
from ddtree_trt.runtime.engines.warming import make_single_passes
from ddtree_trt.runtime.options import EngineOptions

_Result = TypeVar("_Result")


def open_torch(directory: Path, manifest: Manifest, options: EngineOptions) -> Engine:
    """The engine of a directory whose digests were checked, over as many ranks as the options say."""
    engine = TorchEngine if options.tensor_parallel_size == 1 else ParallelEngine
    return engine.open(directory, manifest, options)


class ParallelEngine:
    """The `Engine` protocol over all ranks. One thread calls it.

    A rank that fails or takes too long ends the engine: that call and all later ones raise EngineError, whose text says
    which rank failed and how. Ctrl-C waits for the end of a pass, and the engine goes on.
    """

    batches = True
    foresee = None
    rounds = None  # rounds on the device have no host that could lead other ranks

    def __init__(
        self,
        manifest: Manifest,
        engine: TorchEngine,
        group: Group,
        followers: Followers,
        clean_up: Callable[[], None] = lambda: None,
    ) -> None:
        """`engine` is rank 0's part; `manifest` is that of the whole. `clean_up` is called at the engine's end."""
        self._clean_up = clean_up
        # Latencies depend on the number of ranks: the toolchain is a part of the latency profile's fingerprint.
        toolchain = {**engine.manifest.toolchain, RANKS: str(group.size)}
        self.manifest = replace(manifest, toolchain=toolchain)
        self.threads = engine.threads
        self._engine = engine
        self._group = group
        self._followers = followers
        self._outbox = Outbox(record_size(manifest.limits))
        self._failure: str | None = None
        if engine.device.type == "cuda":  # gloo notices by itself
            followers.watch(group.abort)

    @classmethod
    def open(
        cls, directory: Path, manifest: Manifest, options: EngineOptions, *, timeout_s: float = TIMEOUT_S
    ) -> ParallelEngine:
        """Load an engine directory whose digests were checked over several ranks: this process and others, which it
        starts. Each takes a GPU of this machine, or where it has none some of the processor's threads.

        Raises UsageError for an engine that cannot be split so, too few GPUs, or a process that has a process group
        already, EngineError for ranks that fail or take longer than `opening_limit_s`, and what `TorchEngine.open`
        raises.
        """
        size, threads = options.tensor_parallel_size, options.threads
        check_split(manifest, size)
        opening_s = opening_limit_s(manifest.files[artifact.TORCH_WEIGHTS].size)
        devices = _devices(size)
        if torch.distributed.is_initialized():
            raise UsageError(
                "this process is in a process group of torch.distributed already, another tensor-parallel engine's or "
                "its own; close that first"
            )
        if devices[0].type == "cpu":
            small = manifest.files[artifact.TORCH_WEIGHTS].size < SINGLE_THREAD_BYTES
            threads = threads or (1 if small else max(torch.get_num_threads() // size, 1))
            torch.set_num_threads(threads)
        folder = tempfile.TemporaryDirectory(prefix="ddtree-ranks-")
        meeting = Meeting(str(Path(folder.name) / "store"), size, timeout_s)
        posts = [Post(r, meeting, directory, manifest, str(devices[r]), threads) for r in range(1, size)]
        followers = Followers(posts, opening_s)
        group: Group | None = None
        try:
            followers.expect(HERE)  # starting processes takes longer than the timeout of a group may be
            group = Group(meeting, 0, devices[0], record_size(manifest.limits))
            engine = open_part(directory, manifest, devices[0], group)
            followers.expect(READY)
        except BaseException as error:
            lost = isinstance(error, (EngineError, RuntimeError, OSError))
            found = followers.find_failure() if lost else None
            if found is None and _timed_out(error):
                found = f"the other ranks did not answer within {timeout_s:g} s ({error})"
            followers.kill()
            if group is not None:
                group.leave()
            folder.cleanup()
            if found is not None:
                raise EngineError(f"an engine of {size} ranks could not be opened: {found}") from error
            raise
        return cls(manifest, engine, group, followers, folder.cleanup)

    @property
    def buckets(self) -> Sequence[int]:
        return self._engine.buckets

    def length(self, slot: int) -> int:
        return self._engine.length(slot)

    def draftable_length(self, slot: int) -> int:
        return self._engine.draftable_length(slot)

    def truncate(self, slot: int, length: int) -> None:
        self._later(lambda: self._engine.truncate(slot, length), Call.TRUNCATE, slot, length)

    def prefill(self, slot: int, token_ids: NDArray[np.int64], *, rows: LogitRows, taps: bool) -> Verdict:
        def work() -> Verdict:
            return self._engine.prefill(slot, token_ids, rows=rows, taps=taps)

        return self._whole(self._together(work, Call.PREFILL, slot, ROWS.index(rows), taps, token_ids), 0)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return self._together(lambda: self._engine.draft(requests), Call.DRAFT, *draft_values(requests))

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        verdicts = self._together(lambda: self._engine.verify(requests), Call.VERIFY, *verify_values(requests))
        return [self._whole(verdict, number) for number, verdict in enumerate(verdicts)]

    def commit(self, slot: int, path: NDArray[np.int32], *, taps: bool) -> None:
        self._later(lambda: self._engine.commit(slot, path, taps=taps), Call.COMMIT, slot, taps, path)

    def warm_up(self, progress: Progress = no_progress) -> None:
        """On GPUs: run a prompt's chunk, a tree and a draft, so that libraries are initialised. Nothing is captured."""
        if self._engine.device.type != "cuda":
            return
        length = self.manifest.dflash.draft_length

        def draft(slot: int) -> None:
            self.draft([DraftRequest(slot, 0, 1, length, refuse_to_draw)])

        make_single_passes(self, [1, 1 + self.manifest.limits.max_tree_budget], draft, progress)

    def settle(self) -> None:
        self._engine.settle()

    def close(self) -> None:
        """Release the memory of all ranks and end their processes."""
        try:
            if self._failure is None:
                self._followers.let_end()
                self._together(lambda: None, Call.CLOSE)
                self._followers.join()
        finally:
            if self._failure is None:
                self._end("it was closed")
            self._engine.close()

    def _whole(self, verdict: Verdict, number: int) -> Verdict:
        """A verdict with whole rows of logits, gathered from all ranks when the first of them is read; `number` is its
        place among those of its pass."""
        gathered: list[Tensor] = []

        def fetch(start: int, stop: int) -> NDArray[np.float32]:
            if not gathered:
                gathered.append(self._together(lambda: whole_rows(self._engine, number), Call.READ, number))
            rows: NDArray[np.float32] = gathered[0][start:stop].cpu().numpy()
            return rows

        rows = LazyRows(len(verdict.logits), self.manifest.target_dims.vocab_size, fetch)
        return Verdict(verdict.choices, rows)

    def _later(self, work: Callable[[], None], call: Call, *values: ArrayLike) -> None:
        """Do this rank's part of a call that needs no other rank, and add the call to what the others are sent next."""
        with interrupts_deferred(), self._in_step():
            work()
            self._add(call, *values)

    def _together(self, work: Callable[[], _Result], call: Call, *values: ArrayLike) -> _Result:
        """Have all ranks do a call, of which `work` is this rank's part; returns its result."""
        with interrupts_deferred(), self._in_step():
            self._add(call, *values)
            self._send(self._outbox.take())
            return work()

    def _add(self, call: Call, *values: ArrayLike) -> None:
        if (record := self._outbox.add(call, *values)) is not None:
            self._send(record)

    def _send(self, record: NDArray[np.int32]) -> None:
        self._followers.ring()
        self._group.send(record)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """A part of a call after whose failure the ranks are out of step, so that the engine ends. Raises EngineError,
        also where it had ended before."""
        if self._failure is not None:
            raise EngineError(self._failure)
        try:
            yield
            if self._followers.lost():  # the wait of a GPU has no error when the group was aborted
                raise RuntimeError("a rank has ended")
        except Exception as error:
            self._end(self._cause(error))
            raise EngineError(self._failure) from error
        except BaseException:
            self._end("it was interrupted in the middle of a pass")
            raise

    def _cause(self, error: Exception) -> str:
        """Why a call failed: what the other ranks say, else this rank's error."""
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        if _timed_out(error):
            return f"the other ranks did not answer within {self._group.timeout_s:g} s ({text})"
        lost = isinstance(error, (RuntimeError, OSError))  # what torch.distributed and a closed pipe raise
        found = self._followers.find_failure() if lost else None
        return found or f"rank 0 of {self._group.size} failed: {text}"

    def _end(self, reason: str) -> None:
        self._failure = f"the engine of {self._group.size} ranks has ended: {reason}; open it again"
        self._followers.kill()
        self._group.leave()
        self._clean_up()


def _timed_out(error: BaseException) -> bool:
    """Whether it is torch.distributed's error of a wait for other ranks that took too long."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("timed out" in text or "timeout" in text)


def _devices(size: int) -> list[torch.device]:
    """The devices of the ranks: the process's current GPU first, or the CPU for all where there is no GPU. Raises
    UsageError where there are fewer GPUs than ranks."""
    first = choose_device()
    if first.type == "cpu":
        return [first] * size
    count = torch.cuda.device_count()
    if count < size:
        raise UsageError(f"tensor_parallel_size {size} needs as many GPUs, this process sees {count}; lower it")
    others = [i for i in range(count) if i != first.index]
    return [first, *(torch.device("cuda", i) for i in others[: size - 1])]


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Handle a Ctrl-C in the main thread at the end of the block: in the middle of a pass it would leave the other
    ranks waiting."""
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
