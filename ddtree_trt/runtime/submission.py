"""The handle of a request submitted to AsyncLLM, used on the caller's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from ddtree_trt.runtime.outputs import RequestOutput


class Submission:
    """One submitted request, used on the event loop that submitted it.

    Iterating yields each new part of the output once; the parts' texts joined are the whole text. Leaving a `with`
    block before the end cancels the request, and so does leaving a loop over it, or `result`.
    """

    def __init__(self, request_id: str, cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self.finished = False  # whether its last part, or the error that ended it, has been taken
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._part: RequestOutput | None = None
        self._error: Exception | None = None

    async def result(self) -> RequestOutput:
        """The finished output. Raises the error that ended the request."""
        whole: RequestOutput | None = None
        with self:
            async for part in self:
                whole = part if whole is None else whole.joined(part)
        assert whole is not None, "a request's last part always arrives"
        return whole

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

    def deliver(self, item: RequestOutput | Exception) -> None:
        """Pass a part, or the error that ended the request, to the event loop; for any thread.

        Raises RuntimeError where that loop has been closed.
        """
        self._loop.call_soon_threadsafe(self._put, item)

    def _put(self, item: RequestOutput | Exception) -> None:
        if isinstance(item, Exception):
            self._error = item
        else:
            self._part = item if self._part is None else self._part.joined(item)
        self._arrived.set()


async def iterate_parts(submissions: Sequence[Submission]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The parts of several requests as they arrive, each after its request's index, until all are finished.

    Raises the error of the first request that failed. Read a submission here or by iterating over it, not both.
    """
    arrived = asyncio.Event()
    arrived.set()  # parts may have arrived before
    for submission in submissions:
        submission._arrived = arrived
    while not all(s.finished for s in submissions):
        await arrived.wait()
        arrived.clear()
        for place, submission in enumerate(submissions):
            if submission.finished:
                continue
            if submission._error is not None:
                submission.finished = True
                raise submission._error
            part, submission._part = submission._part, None
            if part is not None:
                submission.finished = part.finished
                yield place, part
