"""The handle of a request submitted to AsyncLLM, used on the caller's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.request_maker import Request


class Submission:
    """One submitted request, used on the event loop that submitted it.

    Iterating yields each new part of the output once; the parts' texts joined are the whole text. Parts are made when
    they are taken. Leaving a `with` block before the end cancels the request, and so does leaving a loop over it, or
    `result`.
    """

    def __init__(self, request: Request, cancel: Callable[[], None]) -> None:
        self.request = request
        self.finished = False  # whether its last part, or the error that ended it, has been taken
        self.failure: Exception | None = None  # what stopped the engine
        self.loop = asyncio.get_running_loop()
        # For the engine's thread: whether each part is waited for, and whether the reader knows that there is one.
        self.streams = False
        self.called = False
        self._cancel = cancel
        self._arrived = asyncio.Event()

    async def result(self) -> RequestOutput:
        """The finished output. Raises the error that ended the request."""
        with self:
            while not self._over():
                await self._arrived.wait()
                self._arrived.clear()
            self.finished = True
            return self.request.output()

    def cancel(self) -> None:
        """End the request; its slots are free before the next round. Does nothing for a finished one."""
        if not self.finished:
            self.finished = True
            self._cancel()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        with self:
            async for _, part in iterate_parts([self]):
                yield part

    def __enter__(self) -> Submission:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def _over(self) -> bool:
        """Whether the request has ended. Raises the error that ended it."""
        if (error := self.failure or self.request.error) is not None:
            self.finished = True
            raise error
        return self.request.released


def call(submissions: Iterable[Submission]) -> None:
    """Tell the readers of requests, on their event loop, that there is something to take."""
    for submission in submissions:
        submission._arrived.set()


async def iterate_parts(submissions: Sequence[Submission]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The parts of several requests as they arrive, each after its request's index, until all are finished.

    Raises the error of the first request that failed. Read a submission here or by iterating over it, not both.
    """
    arrived = asyncio.Event()
    arrived.set()  # parts may have arrived before
    for submission in submissions:
        submission._arrived, submission.streams = arrived, True
    while not all(s.finished for s in submissions):
        await arrived.wait()
        arrived.clear()
        for place, submission in enumerate(submissions):
            submission.called = False  # before it is looked at
            if not submission.finished:
                submission._over()
                if (part := submission.request.take()) is not None:
                    submission.finished = part.finished
                    yield place, part
