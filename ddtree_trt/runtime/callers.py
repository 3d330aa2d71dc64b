"""Who may call an LLM: one thread at a time, in the process that loaded it."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from ddtree_trt.errors import UsageError

_T = TypeVar("_T")


class Home:
    """The process in which an object was made; its engine's threads and device do not survive a fork."""

    def __init__(self, name: str) -> None:
        self._name, self._pid = name, os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises UsageError in a process that was forked from it."""
        if not self.here:
            raise UsageError(
                f"this {self._name} was loaded by process {self._pid} and cannot be used in process {os.getpid()}, "
                "which was forked from it; load one here, or start processes with multiprocessing's spawn method"
            )


class Callers:
    """Lets one caller at a time use an LLM, and refuses a second one by the name of the first.

    A thread that has streams open holds the LLM also between their parts, so that who came first is never the one who
    is refused. Streams of one thread may be read side by side, and a stream may be read on by another thread.
    """

    def __init__(self) -> None:
        self._home = Home("LLM")
        # Held while the engine works, and taken by `with` alone: there an interrupt cannot fall between taking it and
        # being obliged to give it back. Two threads that both found it free follow one another.
        self._lock = threading.Lock()
        self._holder = threading.current_thread()  # who used it last
        self._streams: set[object] = set()  # begun and not ended
        self._endings: deque[Callable[[], None]] = deque()  # left behind while the engine worked
        self._closed = False

    def call(self, work: Callable[[], _T], stream: object = None) -> _T:
        """Run `work`, which is a whole call, or the next part of the stream that is known by a token, and return its
        result. Raises UsageError where it may not run."""
        self._home.check()
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
                    self._finish_endings()
                    return work()
                finally:
                    self._finish_endings()
        finally:
            self._drain()

    def end(self, stream: object, ending: Callable[[], None]) -> None:
        """Forget a stream and run `ending`, which frees its slots: now, or where the engine works, after that call.

        Streams are closed, or collected as garbage, on any thread and also within a call.
        """
        self._streams.discard(stream)
        if self._closed or not self._home.here:
            return
        self._endings.append(ending)
        self._drain()

    def close(self, release: Callable[[], None]) -> None:
        """Run `release`, once; never in a forked process, where the engine is the parent's.

        Raises UsageError while a call is at work.
        """
        if self._closed or not self._home.here:
            return
        self._check_free()
        with self._lock:
            self._closed = True
            release()

    def _check_free(self) -> None:
        if self._lock.locked():
            raise self._taken("whose call has not returned")

    def _check_streams(self) -> None:
        if self._streams and self._holder is not threading.current_thread() and self._holder.is_alive():
            raise self._taken("which has streams open")

    def _taken(self, why: str) -> UsageError:
        return UsageError(
            f"this LLM is in use by thread {self._holder.name!r}, {why}; use AsyncLLM for concurrent callers, or one "
            "LLM for each thread"
        )

    def _drain(self) -> None:
        """Run the endings that nobody else will: those left behind when whoever held the lock was past its own look.

        Whoever holds the lock drains again after giving it back, so that what it is asked to run meanwhile is run.
        """
        while self._endings and not self._lock.locked():
            with self._lock:
                if self._closed:
                    self._endings.clear()
                self._finish_endings()

    def _finish_endings(self) -> None:
        while self._endings:
            self._endings.popleft()()
