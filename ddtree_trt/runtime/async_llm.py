"""AsyncLLM: many concurrent callers, one engine.

One worker thread owns the scheduler and the engine. Callers hand it requests and cancellations through a queue; it hands
back what is new after each step through the caller's event loop. A caller that stops listening is cancelled, and its
slot is free before the next round.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from ddtree_trt.errors import DDTreeError, EngineError
from ddtree_trt.runtime.load import open_engine
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.requests import Request, RequestMaker
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.text import Prompt, TextCodec

Deliver = Callable[[RequestOutput | Exception], None]


class QueueFull(DDTreeError):
    """As many requests wait as the caller allowed."""


class AsyncLLM:
    """An engine behind an asyncio interface.

    Args:
        engine_dir: directory written by `ddtree-trt build`.
        threads: CPU threads of the engine; 0 chooses.
        max_waiting: sequences that may wait for a slot before `QueueFull` is raised; None is unlimited.
    """

    def __init__(self, engine_dir: str | Path, *, threads: int = 0, max_waiting: int | None = None) -> None:
        directory = Path(engine_dir)
        self.engine = open_engine(directory, threads=threads)
        self.codec = TextCodec(directory, self.engine.manifest.chat_template_args)
        self.max_waiting = max_waiting
        self._maker = RequestMaker(self.engine, self.codec)
        self._scheduler = Scheduler(self.engine)
        self._active: dict[str, tuple[Request, Deliver]] = {}  # the worker's
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._admitted = 0  # sequences handed to the worker and not finished
        self._worker = threading.Thread(target=self._work, name="ddtree-engine", daemon=True)
        self._worker.start()

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.codec.tokenizer

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return self._scheduler.slots - self._scheduler.free_slots

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot."""
        return max(0, self._admitted - self.running)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yield the request's output so far after every round; the last one is the whole."""
        request, parts = self._submit(prompt, sampling_params, request_id)
        async for _ in self._listen(request, parts):
            yield request.output()

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yield only what is new after each round; the parts' texts joined are the whole text."""
        request, parts = self._submit(prompt, sampling_params, request_id)
        async for part in self._listen(request, parts):
            yield part

    async def complete(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> RequestOutput:
        """The finished output."""
        request, parts = self._submit(prompt, sampling_params, request_id)
        async for _ in self._listen(request, parts):
            pass
        return request.output()

    async def abort(self, request_id: str) -> None:
        """Cancel a request by its id; an unknown or finished one is left alone."""
        self._command(lambda: self._cancel(request_id))

    async def drain(self) -> None:
        """Wait until no request is running or waiting."""
        while self._admitted:
            await asyncio.sleep(0.01)

    def shutdown(self) -> None:
        """Cancel everything, stop the worker and release the engine."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._worker.join()
        self.engine.close()

    def _submit(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None
    ) -> tuple[Request, asyncio.Queue[RequestOutput | Exception]]:
        """Check the call and hand it to the worker. Raises UsageError, QueueFull, or EngineError after shutdown."""
        params = params or SamplingParams()
        if self.max_waiting is not None and self.waiting + params.n > self.max_waiting + self._scheduler.free_slots:
            raise QueueFull(f"{self.waiting} requests are waiting, at most {self.max_waiting} may; try again later")
        request = self._maker.make(prompt, params, request_id)
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

        def deliver(item: RequestOutput | Exception) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(parts.put_nowait, item)

        with self._wake:
            if self._closing:
                raise EngineError("the engine has been shut down")
            self._admitted += params.n
        self._command(lambda: self._add(request, deliver))
        return request, parts

    async def _listen(
        self, request: Request, parts: asyncio.Queue[RequestOutput | Exception]
    ) -> AsyncIterator[RequestOutput]:
        finished = False
        try:
            while not finished:
                item = await parts.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished:
                self._command(lambda: self._cancel(request.request_id))

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # What follows runs on the worker thread.

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._commands or self._scheduler.busy or self._closing)
                commands, self._commands = self._commands, deque()
                closing = self._closing
            for command in commands:
                command()
            if closing:
                for request_id in list(self._active):
                    self._cancel(request_id)
                return
            self._scheduler.step()
            self._deliver()

    def _add(self, request: Request, deliver: Deliver) -> None:
        if request.request_id in self._active:
            self._admitted -= len(request.sequences)
            deliver(EngineError(f"request id {request.request_id!r} is already in use"))
            return
        self._active[request.request_id] = (request, deliver)
        for sequence in request.sequences:
            self._scheduler.add(sequence)

    def _cancel(self, request_id: str) -> None:
        if request_id in self._active:
            for sequence in self._active[request_id][0].sequences:
                if not sequence.finished:
                    self._scheduler.cancel(sequence)
            self._deliver()

    def _deliver(self) -> None:
        for request_id, (request, deliver) in list(self._active.items()):
            error = next((s.error for s in request.sequences if s.error is not None), None)
            if request.finished:
                del self._active[request_id]
                self._admitted -= len(request.sequences)
            if error is not None:
                deliver(error)
            elif part := request.take():
                deliver(part)
