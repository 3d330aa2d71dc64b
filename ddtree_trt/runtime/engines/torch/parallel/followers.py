"""The processes of the other ranks, as rank 0 starts, watches and ends them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess

from ddtree_trt.errors import EngineError, UsageError, shown
from ddtree_trt.runtime.engines.torch.parallel.follower import Post, follow

_NAME = "ddtree-rank-"
_NOT_BEGUN = ' before it began: a script that opens such an engine must do so under if __name__ == "__main__":'
OPENING = "DDTREE_OPENING_SECONDS"  # environment: how long the other ranks may take to open an engine
_OPENING_S = 600.0  # where it says nothing, and besides the time that a slow disk takes for the weights
_MOST_S = 1e6  # days; the system's calls that wait take little more
_SLOW_DISK = 50e6  # bytes per second
_REPORT_S = 5.0  # from a broken connection to what its cause is known by
_CLOSE_S = 10.0  # how long a follower may take to release its part


def opening_limit_s(weight_bytes: int) -> float:
    """Seconds that ranks may take from their start until they have opened an engine with so many bytes of weights.
    Raises UsageError where the environment's number is none."""
    if not (text := os.environ.get(OPENING, "")):
        return _OPENING_S + weight_bytes / _SLOW_DISK
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) <= _MOST_S:
            return seconds
    raise UsageError(
        f"the environment variable {OPENING} must be a number of seconds above 0, at most {_MOST_S:.0f}, "
        f"not {shown(text)}"
    )


class _Follower:
    """One follower's process and what it has reported."""

    def __init__(self, post: Post, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.name = f"rank {post.rank} of {size}"
        self._began = False  # whether it has reported anything but an error
        self._report: str | None = None  # of an error
        self.process: SpawnProcess = context.Process(
            target=follow, args=(post, theirs), name=f"{_NAME}{post.rank}", daemon=True
        )
        self.process.start()
        theirs.close()  # so that only the follower has it

    def expect(self, report: str) -> bool:
        """Wait for the next report; whether it is this one."""
        with contextlib.suppress(EOFError, OSError):
            found = self.connection.recv()
            if found == report:
                self._began = True
                return True
            self._report = found
        return False

    def failure(self) -> str | None:
        """How it failed: the text that it reported, or else how its process ended; None where it runs."""
        with contextlib.suppress(EOFError, OSError):
            while self._report is None and self.connection.poll():
                self._report = self.connection.recv()
        if self._report is not None:
            return f"{self.name} failed: {self._report}"
        code = self.process.exitcode
        if code is None:
            return None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} {how}{'' if self._began or code < 0 else _NOT_BEGUN}"


class Followers:
    """One process per rank from 1 on."""

    def __init__(self, posts: Sequence[Post], opening_s: float) -> None:
        """Start them; within `opening_s` seconds they must have sent all reports that are expected.

        Raises UsageError in a process that is itself being started as one: the script that it imports opens an engine.
        """
        if multiprocessing.current_process().name.startswith(_NAME):
            raise UsageError(
                "the other ranks of an engine import the script that opens it: put what the script runs under "
                'if __name__ == "__main__":'
            )
        self._closing = False
        self._opening_s = opening_s
        self._deadline = time.monotonic() + opening_s
        self._each: list[_Follower] = []
        try:
            for post in posts:
                self._each.append(_Follower(post, 1 + len(posts)))
        except BaseException:
            self.kill()
            raise

    @property
    def processes(self) -> list[SpawnProcess]:
        """By rank, from 1 on."""
        return [follower.process for follower in self._each]

    def expect(self, report: str) -> None:
        """Wait until every follower has sent this report. Raises EngineError where one has failed instead, which
        `find_failure` explains, and where one has sent nothing when the time for opening is over."""
        waiting = {follower.connection: follower for follower in self._each}
        while waiting:
            found = wait(list(waiting), max(self._deadline - time.monotonic(), 0))
            if not found:
                names = ", ".join(f"{each.name} (process {each.process.pid})" for each in waiting.values())
                raise EngineError(
                    f"an engine of {1 + len(self._each)} ranks could not be opened: {names} did not report {report!r} "
                    f"within {self._opening_s:g} s; if it is only slow, set {OPENING} to more seconds"
                )
            for follower in [waiting[each] for each in waiting if each in found]:
                if not follower.expect(report):
                    raise EngineError(f"a rank has not reported that it is {report}")
                del waiting[follower.connection]

    def ring(self) -> None:
        """Tell every follower that a record follows. Raises OSError where one has ended."""
        for follower in self._each:
            follower.connection.send_bytes(b"")

    def lost(self) -> bool:
        """Whether a follower's process has ended that was not told to."""
        return not self._closing and any(process.exitcode is not None for process in self.processes)

    def find_failure(self, patience_s: float = _REPORT_S) -> str | None:
        """How followers failed, as far as they say within that time; None where all still run."""
        deadline = time.monotonic() + patience_s
        while True:
            if found := [text for follower in self._each if (text := follower.failure())]:
                return "; ".join(found)
            if not wait([p.sentinel for p in self.processes], max(deadline - time.monotonic(), 0)):
                return None

    def watch(self, on_end: Callable[[], None]) -> None:
        """Call `on_end`, in a thread, when a follower ends that was not told to."""

        def work() -> None:
            wait([process.sentinel for process in self.processes])
            if not self._closing:
                on_end()

        threading.Thread(target=work, name="ddtree-followers", daemon=True).start()

    def let_end(self) -> None:
        """Followers that end from now on were told to."""
        self._closing = True

    def join(self) -> None:
        """Wait for the end of followers that were told to, and end those that take too long."""
        for process in self.processes:
            process.join(_CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """End all followers now."""
        self._closing = True
        for follower in self._each:
            follower.process.kill()
            follower.process.join()
            follower.connection.close()
