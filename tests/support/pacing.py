"""Waiting for a condition, and engines whose passes a test holds and lets go: what must happen before the next pass
then happens before it however slow or busy the machine is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

WAIT_S = 300.0  # a guard against hangs: an idle machine takes a twentieth of it where Ray starts, else far less
_POLL_S = 0.005


def wait_for(condition: Callable[[], object]) -> None:
    """Until the condition holds; fails the test when it does not."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(_POLL_S)


async def until(condition: Callable[[], bool]) -> None:
    """The same on an event loop, which runs meanwhile."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        await asyncio.sleep(_POLL_S)


async def complete(llm: Any, *request: Any, **options: Any) -> Any:
    """The finished output of a request to an AsyncLLM."""
    return await llm.submit(*request, **options).result()


class Passes:
    """Stands before `engine.verify` and decides when a pass may begin. Open at first.

    Args:
        engine: any engine; its `verify` is replaced.
        seconds: added to every pass, so that a long request lasts longer than what a test does beside it.
    """

    def __init__(self, engine: Any, seconds: float = 0.0) -> None:
        self.begun = 0
        self._may_begin: Callable[[list[Any]], bool] = lambda requests: True
        self._state = threading.Condition()  # guards the two above and _waiting
        self._waiting = False
        self._seconds, self._verify = seconds, engine.verify
        engine.verify = self._pass

    def _pass(self, requests: list[Any]) -> Any:
        time.sleep(self._seconds)
        end = time.monotonic() + WAIT_S
        with self._state:
            self.begun += 1
            self._waiting = True
            while not self._may_begin(requests):
                assert time.monotonic() < end, "the pass was not let go in time"
                self._state.wait(_POLL_S)
            self._waiting = False
        return self._verify(requests)

    @property
    def held(self) -> bool:
        """Whether a pass waits to be let go."""
        with self._state:
            return self._waiting

    def hold(self) -> None:
        """Let no pass begin until `release`. One that has begun goes on."""
        self.wait_until(lambda requests: False)

    def release(self) -> None:
        self.wait_until(lambda requests: True)

    def wait_until(self, condition: Callable[[list[Any]], bool]) -> None:
        """Let a pass over `requests` begin only when the condition holds for them."""
        with self._state:
            self._may_begin = condition
            self._state.notify_all()

    def in_step_with(self, read: Callable[[], int], parts: int, slots: int = 1) -> None:
        """Let a step begin only when what came before the one before it has been read, for the first `parts` steps:
        then the reader gets more than `parts` parts, since none can be joined with the next. `read` counts them.
        `slots`: how many take turns in a step, each with a pass of its own."""
        before = self.begun
        self.wait_until(lambda requests: read() >= min((self.begun - before - 1) // slots, parts))
