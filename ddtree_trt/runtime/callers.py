"""Guards of calls to an LLM: one thread at a time, in the process that loaded it."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from ddtree_trt.errors import UsageError

_T = TypeVar("_T")


class OwnerProcess:
    """The process in which an object was made; its engine's threads and device do not survive a fork."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether the calling process is that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises UsageError in a process that was forked from it."""
        if not self.is_current:
            raise UsageError(
                f"this {self._name} was loaded by process {self._pid} and cannot be used in process {os.getpid()}, "
                "which was forked from it; load one here, or start processes with multiprocessing's spawn method"
            )


class Callers:
    """Lets one thread at a time use an LLM, and refuses a second one with an error that names the first.

    A thread with open streams holds the LLM between their parts too, so that the first thread is never the one refused.
    Streams of one thread may be read alternately, and reading a stream may continue on another thread.
    """

    def __init__(self) -> None:
        self._owner = OwnerProcess("LLM")
        # Held while the engine works. Acquired by `with` only, which an interrupt cannot leave between acquiring and
        # releasing it. Of two threads that both found it free, the second one waits.
        self._lock = threading.Lock()
        self._holder = threading.current_thread()  # the last thread that used the LLM
        self._streams: set[object] = set()  # keys of the streams begun and not ended
        self._endings: deque[Callable[[], None]] = deque()  # of streams that ended while the engine worked
        self._closed = False

    def call(self, work: Callable[[], _T], stream: object = None) -> _T:
        """The result of `work`, which is a whole call, or makes the next part of the stream with the key `stream`.

        Raises UsageError where it may not run.
        """
        self._owner.check()
        if self._closed:
            raise UsageError("this LLM is closed; make another one")
        self._check_free()
        if stream is None or stream not in self._streams:
            self._check_streams()
        try:
            with self._lock:
                self._holder = threading.current_thread()
                if stream is not None:
                    self._streams.add(stream)
                try:
                    self._run_endings()
                    return work()
                finally:
                    self._run_endings()
        finally:
            self._run_late_endings()

    def end(self, stream: object, ending: Callable[[], None]) -> None:
        """Forget a stream and run `ending`, which frees its slots: at once, or after the call that the engine works on.

        Streams are closed, or collected as garbage, on any thread and also within a call.
        """
        self._streams.discard(stream)
        if self._closed or not self._owner.is_current:
            return
        self._endings.append(ending)
        self._run_late_endings()

    def close(self, release: Callable[[], None]) -> None:
        """Run `release`, once; never in a forked process, where the engine belongs to the parent.

        Raises UsageError while a call is running.
        """
        if self._closed or not self._owner.is_current:
            return
        self._check_free()
        with self._lock:
            self._closed = True
            release()

    def _check_free(self) -> None:
        if self._lock.locked():
            raise self._in_use("whose call has not returned")

    def _check_streams(self) -> None:
        if self._streams and self._holder is not threading.current_thread() and self._holder.is_alive():
            raise self._in_use("which has streams open")

    def _in_use(self, why: str) -> UsageError:
        return UsageError(
            f"this LLM is in use by thread {self._holder.name!r}, {why}; use AsyncLLM for concurrent callers, or one "
            "LLM for each thread"
        )

    def _run_late_endings(self) -> None:
        """Run the endings that arrived after the holder of the lock had run its last ones.

        Every holder calls this after it has released the lock, so that no ending stays in the queue.
        """
        while self._endings and not self._lock.locked():
            with self._lock:
                if self._closed:
                    self._endings.clear()
                self._run_endings()

    def _run_endings(self) -> None:
        while self._endings:
            self._endings.popleft()()
