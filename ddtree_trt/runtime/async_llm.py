"""AsyncLLM: many concurrent callers, one engine.

One worker thread owns the scheduler, the engine and every sequence; callers on event loops put commands into a queue,
which it empties between two steps. After a step it calls the readers of what has grown, once for each event loop. They
take what is new from the sequences themselves; a slow one finds more in one part, and delays no other request.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.errors import DDTreeError, EngineError, UsageError
from ddtree_trt.runtime.core import Client, open_core
from ddtree_trt.runtime.decoding.loop import Watcher
from ddtree_trt.runtime.options import EngineOptions
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.request_maker import Request
from ddtree_trt.runtime.sequence import Sequence
from ddtree_trt.runtime.text.codec import Prompt, Tools


class Submission:
    """One submitted request, used on the event loop that submitted it.

    Iterating yields each new part of the output once; the parts' texts joined are the whole text. Leaving a `with`
    block before the end cancels the request, and so does leaving a loop over it, or `result`.
    """

    def __init__(self, request: Request, cancel: Callable[[], None]) -> None:
        self.request = request
        self.finished = False  # whether its last part, or the error that ended it, has been taken
        self.failure: Exception | None = None  # what stopped the engine
        self.loop = asyncio.get_running_loop()
        # For the engine's thread: whether each part is waited for, and whether the reader knows that there is one.
        self.streams = self.called = False
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

    def __enter__(self) -> Self:
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


async def iterate_parts(submissions: Iterable[Submission]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The parts of several requests as they arrive, each after its request's index, until all are finished.

    Raises the error of the first request that failed. Read a submission here or by iterating over it, not both.
    """
    submissions, arrived = [*submissions], asyncio.Event()
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


_log = logging.getLogger(__name__)


class QueueFull(DDTreeError):
    """The queue holds `max_waiting` sequences."""


class AsyncLLM(Client):
    """An engine behind an asyncio interface.

    Args:
        engine_dir: directory written by `ddtree-trt build`.
        options: as for LLM, whose fields may be given one by one, too.
        progress: as for LLM.
        max_waiting: sequences that may wait for a slot before `QueueFull` is raised; None is unlimited.
        on_finished: called on the worker thread with every request that ended, for whatever reason; it must be quick.
            Its exceptions are logged and ignored.

    Raises ArtifactError when the directory cannot be used. Calls in a process forked from the one that loaded it raise
    UsageError.
    """

    def __init__(
        self,
        engine_dir: str | Path,
        options: EngineOptions | None = None,
        *,
        progress: Progress = no_progress,
        max_waiting: int | None = None,
        on_finished: Callable[[Request], None] | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(open_core(Path(engine_dir), options, progress=progress, **fields))
        self.slots = self.core.scheduler.slots  # sequences that can run at a time
        self.max_waiting = max_waiting
        self._on_finished = on_finished
        # The condition guards what follows; the worker waits on it.
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._active: dict[str, Submission] = {}
        self._admitted = 0  # sequences submitted and not ended
        self._closing = False
        self.failure: EngineError | None = None  # what stopped the engine for good
        self._cancelled: list[Sequence] = []  # since the last delivery; of the worker
        self._worker = threading.Thread(target=self._work, name="ddtree-engine", daemon=True)
        self._worker.start()

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return self.slots - self.core.scheduler.free_slots

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot."""
        return max(0, self._admitted - self.running)

    @property
    def failed(self) -> bool:
        return self.failure is not None

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Tools | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the request's output so far after every round; the last one is the finished output."""
        given: Any = {"chat_template_kwargs": chat_template_kwargs, "tools": tools}
        whole: RequestOutput | None = None
        with self.submit(prompt, sampling_params, request_id, **given) as submission:
            async for part in submission:
                whole = part if whole is None else whole.joined(part)
                yield whole

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        on_round: Watcher | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Tools | None = None,
        text: str | None = None,
    ) -> Submission:
        """Hand a request to the worker. Call on a running event loop. `chat_template_kwargs` and `tools` are as for
        `LLM.generate`, `on_round` as for `LLM.stream`: on the worker thread, so be quick. `text`: what token ids say.

        Raises UsageError for a wrong call or a request id in use, QueueFull, or EngineError after shutdown or failure.
        """
        self._check_process()
        params = sampling_params or SamplingParams()
        given: Any = {"chat_template_kwargs": chat_template_kwargs, "tools": tools, "text": text}
        request = self.core.maker.make(prompt, params, request_id, on_round=on_round, **given)
        submission = Submission(request, lambda: self._command(partial(self._cancel, request)))
        for sequence in request.sequences:
            sequence.owner = submission
        with self._wake:
            self._check_room(params.n)
            if request.request_id in self._active:
                raise UsageError(f"request id {request.request_id!r} is already in use; choose another")
            self._active[request.request_id] = submission
            self._admitted += params.n
            self._command(lambda: self.core.add(request))
        return submission

    async def abort(self, request_id: str) -> None:
        """Cancel a request by its id: it finishes with reason "abort". Does nothing for an unknown or finished one."""
        self._check_process()
        if (submission := self._active.get(request_id)) is not None:
            self._command(partial(self._cancel, submission.request))

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, as `LLM.reset_prefix_cache`. Raises EngineError after shutdown or failure."""
        self._check_process()
        self._check_alive()
        self._command(self.core.scheduler.reset_prefix_cache)

    async def drain(self) -> None:
        """Wait until no request is running or waiting."""
        self._check_process()
        while self._admitted:
            await asyncio.sleep(0.02)

    def shutdown(self) -> None:
        """Cancel everything, stop the worker and release the engine. Does nothing in a forked process."""
        if self._forked:
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._worker.join()
        self.core.close()

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._closing:
            raise EngineError("the engine has been shut down")

    def _check_room(self, sequences: int) -> None:
        self._check_alive()
        if self.max_waiting is None:
            return
        room = self.slots + self.max_waiting
        if sequences > room:
            raise UsageError(f"n {sequences} is more than the {room} sequences that may run or wait here; lower it")
        if self._admitted + sequences > room:
            raise QueueFull(f"{self._admitted} sequences run or wait, at most {room} may; try again later")

    def _command(self, command: Callable[[], None]) -> None:
        if self._forked:  # a submission that was closed, or collected as garbage, in a forked process
            return
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # What follows runs on the worker thread.

    def _work(self) -> None:
        try:
            while self._iterate():
                pass
        except BaseException as error:  # not of one request: a bug, or a broken engine. No caller may be left waiting
            self._fail(error)

    def _iterate(self) -> bool:
        """Run the queued commands and one step, and deliver; returns False when the worker must end."""
        with self._wake:
            self._wake.wait_for(lambda: self._commands or self.core.scheduler.busy or self._closing)
            commands, self._commands = self._commands, []
            closing = self._closing
        for command in commands:
            command()
        for submission in [*self._active.values()] if closing else ():
            self._cancel(submission.request)
        advanced = [] if closing else self.core.scheduler.step()
        self._deliver(advanced + self._cancelled)
        return not closing

    def _cancel(self, request: Request) -> None:
        self._cancelled += [s for s in request.sequences if s.finish_reason is None]
        self.core.cancel(request)

    def _deliver(self, sequences: list[Sequence]) -> None:
        """Count those that have ended, and call the readers of all."""
        self._cancelled = []
        called: dict[Any, list[Submission]] = {}
        for s in sequences:
            submission = s.owner
            readers = called.setdefault(submission.loop, [])
            if s.finish_reason is not None:
                self._count_ended(s)
            elif not (s.output and submission.streams) or submission.called:
                continue
            submission.called = True
            readers.append(submission)
        for loop, submissions in called.items():
            try:
                if submissions or loop.is_closed():
                    loop.call_soon_threadsafe(call, submissions)
            except RuntimeError:  # the callers' event loop has been closed
                with self._wake:
                    lost = [each for each in self._active.values() if each.loop is loop]
                for submission in lost:
                    self._command(partial(self._cancel, submission.request))

    def _count_ended(self, sequence: Sequence) -> None:
        """Forget a sequence's request when all of it have ended. Where one failed the others are cancelled."""
        submission: Submission = sequence.owner
        request = submission.request
        if sequence.error is not None:
            self._command(partial(self._cancel, request))
        with self._wake:
            self._admitted -= 1
            if not request.finished or self._active.get(request.request_id) is not submission:
                return
            del self._active[request.request_id]
        try:
            if self._on_finished is not None:
                self._on_finished(request)
        except BaseException:  # SystemExit too: this thread serves all requests
            _log.exception("on_finished failed for request %r", request.request_id)

    def _fail(self, error: BaseException) -> None:
        failure = EngineError(f"the engine stopped ({type(error).__name__}: {error}); restart the process")
        failure.__cause__ = error
        with self._wake:
            self.failure = failure
            everyone = list(self._active.values())
            self._active.clear()
            self._commands.clear()
            self._admitted = 0
        for submission in everyone:
            submission.failure = failure
            with suppress(RuntimeError):  # as in _deliver
                submission.loop.call_soon_threadsafe(call, [submission])
