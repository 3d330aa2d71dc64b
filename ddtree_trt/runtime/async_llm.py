"""AsyncLLM: many concurrent callers, one engine.

One worker thread owns the scheduler, the engine and every sequence; callers live on event loops. Callers leave commands
in a queue the worker empties between two steps, so a cancelled request's slot is free before the next round. The worker
hands over finished snapshots through `call_soon_threadsafe`; nothing is written by both sides. A part that nobody has
read is joined with the next one, so a slow reader costs the memory of one output and nobody's time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_trt.errors import DDTreeError, EngineError, UsageError
from ddtree_trt.runtime.callers import Home
from ddtree_trt.runtime.core import open_core
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.params import DeviceRoundsMode, SamplingParams
from ddtree_trt.runtime.request_maker import Request
from ddtree_trt.runtime.submission import Submission
from ddtree_trt.runtime.text.codec import Prompt

_log = logging.getLogger(__name__)


class QueueFull(DDTreeError):
    """As many sequences wait as the caller allowed."""


@dataclass
class _Active:
    request: Request
    submission: Submission
    ended: int = 0  # sequences no longer counted as admitted


class AsyncLLM:
    """An engine behind an asyncio interface.

    Args:
        engine_dir: directory written by `ddtree-trt build`.
        threads: CPU threads of the engine; 0 chooses.
        device_rounds, exact: as for LLM.
        max_waiting: sequences that may wait for a slot before `QueueFull` is raised; None is unlimited.
        on_finished: called with every request that ended, in whatever way, on the worker thread; it must be quick.
            What it raises is logged and changes nothing.

    Raises ArtifactError when the directory cannot be used. For the process that loaded it: calls in one that was forked
    from it are UsageErrors.
    """

    def __init__(
        self,
        engine_dir: str | Path,
        *,
        threads: int = 0,
        device_rounds: DeviceRoundsMode = "auto",
        exact: bool | None = None,
        max_waiting: int | None = None,
        on_finished: Callable[[Request], None] | None = None,
    ) -> None:
        self._home = Home("AsyncLLM")
        self.core = open_core(Path(engine_dir), threads=threads, exact=exact, device_rounds=device_rounds)
        self.engine, self.codec = self.core.engine, self.core.codec
        self.max_waiting = max_waiting
        self._on_finished = on_finished
        # Guarded by the condition; the worker waits on it.
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._active: dict[str, _Active] = {}
        self._admitted = 0  # sequences handed over and not ended
        self._closing = self._closed = False
        self._failure: EngineError | None = None
        self._worker = threading.Thread(target=self._work, name="ddtree-engine", daemon=True)
        self._worker.start()

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.codec.tokenizer

    @property
    def slots(self) -> int:
        """Sequences that can run at a time."""
        return self.core.scheduler.slots

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return self.core.scheduler.slots - self.core.scheduler.free_slots

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot."""
        return max(0, self._admitted - self.running)

    @property
    def failure(self) -> EngineError | None:
        """Why the engine stopped for good, or None while it works."""
        return self._failure

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the request's output so far after every round; the last one is the whole."""
        with self.submit(prompt, sampling_params, request_id, chat_template_kwargs=chat_template_kwargs) as submission:
            whole: RequestOutput | None = None
            async for part in submission:
                whole = part if whole is None else whole.joined(part)
                yield whole

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield only what is new after each round; the parts' texts joined are the whole text."""
        with self.submit(prompt, sampling_params, request_id, chat_template_kwargs=chat_template_kwargs) as submission:
            async for part in submission:
                yield part

    async def complete(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        """The finished output."""
        with self.submit(prompt, sampling_params, request_id, chat_template_kwargs=chat_template_kwargs) as submission:
            return await submission.result()

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Submission:
        """Hand a request to the worker. Call on a running event loop. `chat_template_kwargs` are as for `LLM.generate`.

        Raises UsageError for a wrong call or a request id in use, QueueFull, or EngineError after shutdown or failure.
        """
        self._home.check()
        params = sampling_params or SamplingParams()
        request = self.core.maker.make(prompt, params, request_id, chat_template_kwargs=chat_template_kwargs)
        submission = Submission(request.request_id, lambda: self._command(lambda: self.core.cancel(request)))
        active = _Active(request, submission)
        with self._wake:
            self._check_room(params.n)
            if request.request_id in self._active:
                raise UsageError(f"request id {request.request_id!r} is already in use; choose another")
            self._active[request.request_id] = active
            self._admitted += params.n
            self._commands.append(lambda: self.core.add(request))
            self._wake.notify()
        return submission

    async def abort(self, request_id: str) -> None:
        """Cancel a request by its id: it finishes with reason "abort". An unknown or finished one is left alone."""
        self._home.check()
        with self._wake:
            active = self._active.get(request_id)
        if active is not None:
            self._command(lambda: self.core.cancel(active.request))

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix: requests submitted from now on compute their whole prompts. Those under way go on
        undisturbed. Raises EngineError after shutdown or failure."""
        self._home.check()
        with self._wake:
            self._check_alive()
            self._commands.append(self.core.scheduler.reset_prefix_cache)
            self._wake.notify()

    async def drain(self) -> None:
        """Wait until no request is running or waiting."""
        self._home.check()
        while self._admitted:
            await asyncio.sleep(0.02)

    def shutdown(self) -> None:
        """Cancel everything, stop the worker and release the engine. Requests under way finish with reason "abort".

        In a forked process nothing happens: worker and engine are the parent's.
        """
        if not self._home.here:
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._worker.join()
        if not self._closed:
            self._closed = True
            self.engine.close()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise EngineError("the engine has been shut down")

    def _check_room(self, sequences: int) -> None:
        self._check_alive()
        if self.max_waiting is None:
            return
        room = self.core.scheduler.slots + self.max_waiting
        if sequences > room:
            raise UsageError(f"n {sequences} is more than the {room} sequences that may run or wait here; lower it")
        if self._admitted + sequences > room:
            raise QueueFull(f"{self.waiting} sequences are waiting, at most {self.max_waiting} may; try again later")

    def _command(self, command: Callable[[], None]) -> None:
        if not self._home.here:  # a submission that was closed, or collected as garbage, in a forked process
            return
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # What follows runs on the worker thread.

    def _work(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # outside any one pass: a bug, or an engine beyond repair. Nobody may wait
            self._fail(error)

    def _turn(self) -> bool:
        """Obey the commands and do one step; False when the worker is to end."""
        with self._wake:
            self._wake.wait_for(lambda: self._commands or self.core.scheduler.busy or self._closing)
            commands, self._commands = self._commands, deque()
            closing, active = self._closing, list(self._active.values())
        for command in commands:
            command()
        if closing:
            for a in active:
                self.core.cancel(a.request)
        else:
            self.core.scheduler.step()
        self._deliver()
        return not closing

    def _deliver(self) -> None:
        """Hand every request what is new, after its slots have been given back."""
        with self._wake:
            everyone = list(self._active.values())
        for active in everyone:
            request = active.request
            error = next((s.error for s in request.sequences if s.error is not None), None)
            if error is not None:
                self.core.cancel(request)  # what is left of a request that failed in part
            part = request.take()
            self._account(active)
            if request.finished:
                self._report_finished(request)
            if error is not None:
                self._hand_over(active, error)
            elif part is not None:
                self._hand_over(active, part)

    def _report_finished(self, request: Request) -> None:
        if self._on_finished is None:
            return
        try:
            self._on_finished(request)
        except BaseException:  # SystemExit too: this thread works for all requests
            _log.exception("on_finished failed for request %r", request.request_id)

    def _account(self, active: _Active) -> None:
        ended = sum(s.finished for s in active.request.sequences)
        if ended > active.ended:
            with self._wake:
                self._admitted -= ended - active.ended
                active.ended = ended
                if active.request.finished:
                    del self._active[active.request.request_id]

    def _hand_over(self, active: _Active, item: RequestOutput | Exception) -> None:
        submission = active.submission
        try:
            submission._loop.call_soon_threadsafe(submission._put, item)
        except RuntimeError:  # the caller's event loop has been closed: nobody is left to read
            self._command(lambda: self.core.cancel(active.request))

    def _fail(self, error: BaseException) -> None:
        failure = EngineError(f"the engine stopped ({type(error).__name__}: {error}); restart the process")
        failure.__cause__ = error
        with self._wake:
            self._failure = failure
            everyone = list(self._active.values())
            self._active.clear()
            self._commands.clear()
            self._admitted = 0
        for active in everyone:
            with suppress(RuntimeError):  # as in _hand_over
                active.submission._loop.call_soon_threadsafe(active.submission._put, failure)
