"""The engine behind one model instance: requests in, responses out, many at a time.

Three threads besides the server's: the engine's worker, an event loop on which every request is a task that forwards
its parts, and a watcher that ends cancelled and overdue requests and flushes the metrics. The watcher sleeps while
there are no requests.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from ddtree_trt.errors import DDTreeError, MissingDependency, UsageError
from ddtree_trt.runtime.async_llm import AsyncLLM, QueueFull
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.triton.metrics import (
    ENGINE_GAUGES,
    FORWARD_CPU_SECONDS,
    FORWARD_SECONDS,
    REQUEST_COUNTERS,
    REQUEST_HISTOGRAMS,
    RESPONSES,
    Metrics,
)
from ddtree_trt.triton.requests import Call
from ddtree_trt.triton.responses import Arrays, Responder
from ddtree_trt.triton.settings import Settings

WATCH_S = 0.05  # longest delay until a cancellation or a deadline is noticed
_MESSAGE_BYTES = 1000  # of an error; what it repeats of a request is shorter
_log = logging.getLogger(__name__)
Code = Literal["INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL"]  # names of TritonError's codes


class Reply(Protocol):
    """Sends responses to one request's client. `cancelled` is called by another thread than `send`."""

    def send(self, arrays: Arrays, *, final: bool) -> None:
        """Send a response."""

    def fail(self, code: Code, message: str) -> None:
        """Send an error as the last response."""

    def cancelled(self) -> bool:
        """Whether the client has cancelled the request or disconnected."""


@dataclass(eq=False)
class _Job:
    call: Call
    reply: Reply
    responder: Responder
    deadline: float | None  # time.monotonic()
    future: Future[None] | None = None
    task: asyncio.Task[None] | None = None  # set by the task itself, on the loop
    ended_by: str | None = None  # the outcome, where another thread ends the request
    counted: Counter[str] = field(default_factory=Counter)  # what this request has added to the metrics

    def progress(self, part: RequestOutput) -> Counter[str]:
        """The counters' growth since the last call."""
        now = Counter({name: row.read(part.metrics) for name, row in REQUEST_COUNTERS.items()})
        grown, self.counted = now - self.counted, now
        return grown

    def timeout_message(self) -> str:
        timeout, tokens = (self.call.timeout_s or 0) * 1000, self.counted["vllm:generation_tokens_total"]
        return f"the request's timeout of {timeout:.0f} ms passed after {tokens} tokens"


class Service:
    """Runs requests on an engine until it is closed.

    Args:
        engine_dir: directory written by `ddtree-trt build`.
        settings: the exported model's.
        metrics: this instance's; closed with the service.

    Raises ArtifactError when the engine cannot be used.
    """

    def __init__(self, engine_dir: Path, settings: Settings, metrics: Metrics) -> None:
        self._llm = AsyncLLM(engine_dir, threads=settings.threads, max_waiting=settings.max_queue)
        self._llm.core.maker.grammars.isolated = True
        self._layout = settings.layout
        self._metrics = metrics
        self._jobs: set[_Job] = set()
        self._lock = threading.Lock()  # guards _jobs and the start of a job against closing
        self._busy = threading.Event()
        self._closing = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._forwarder = threading.Thread(target=self._loop.run_forever, name="ddtree-forward", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="ddtree-watch", daemon=True)
        self._flush()
        self._forwarder.start()
        self._watcher.start()

    def receive(self, parse: Callable[[], Call], reply: Reply) -> None:
        """Start the request that `parse` returns; responses and errors go to `reply`. Returns at once, and raises
        nothing: an exception would fail the other requests of the batch, and leave them unanswered."""
        try:
            self._start(parse(), reply)
        except UsageError as error:
            self._finish(reply, "refused", error)
        except Exception as error:
            _log.exception("a request could not be read")
            self._finish(reply, "failed", error)
        self._busy.set()

    def _start(self, call: Call, reply: Reply) -> None:
        deadline = None if call.timeout_s is None else time.monotonic() + call.timeout_s
        job = _Job(call, reply, Responder(call, self._layout), deadline)
        with self._lock:
            closing = self._closing.is_set()
            if not closing:
                self._jobs.add(job)
                job.future = asyncio.run_coroutine_threadsafe(self._serve(job), self._loop)
        if closing:
            self._finish(reply, "shutdown")

    def close(self) -> None:
        """End every request, free the slots, release the engine and stop the threads."""
        with self._lock:
            self._closing.set()
            jobs = list(self._jobs)
        for job in jobs:
            self._end(job, "shutdown")
        for job in jobs:
            if job.future is not None:
                job.future.exception()  # waits
        self._busy.set()
        self._watcher.join()
        self._llm.core.maker.grammars.close()
        self._llm.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._forwarder.join()
        self._flush()
        self._metrics.close()

    # On the event loop.

    async def _serve(self, job: _Job) -> None:
        job.task = asyncio.current_task()
        try:
            if job.ended_by is not None:
                raise asyncio.CancelledError
            self._finish(job.reply, await self._forward(job))
        except asyncio.CancelledError:
            self._finish(
                job.reply, job.ended_by or "shutdown", job.timeout_message() if job.ended_by == "timeout" else ""
            )
        except (UsageError, MissingDependency) as error:
            self._finish(job.reply, "refused", error)
        except QueueFull as error:
            self._finish(job.reply, "overloaded", error)
        except Exception as error:  # of the engine or of this module: the client must get an error
            _log.exception("a request failed")
            self._finish(job.reply, "failed", error)
        finally:
            with self._lock:
                self._jobs.discard(job)
            self._busy.set()

    async def _forward(self, job: _Job) -> str:
        """Send the request's responses; returns the outcome."""
        whole: RequestOutput | None = None
        if job.call.params.structured is not None:  # compiling takes its time, which others should not wait
            await asyncio.to_thread(self._llm.core.maker.grammars.check, job.call.params.structured)
        with self._llm.submit(job.call.prompt, job.call.params) as submission:
            async for part in submission:
                started, cpu = time.perf_counter(), time.thread_time()
                whole = part if whole is None or job.call.stream else whole.joined(part)
                grown = job.progress(part)
                if job.call.stream or part.finished:
                    job.reply.send(job.responder.arrays(whole), final=part.finished)
                    grown[RESPONSES] = 1
                spent = {
                    FORWARD_SECONDS: time.perf_counter() - started,
                    FORWARD_CPU_SECONDS: time.thread_time() - cpu,
                }
                self._metrics.add(**grown, **spent)
        assert whole is not None, "a request's last part always arrives"
        self._metrics.observe((name, x) for name, row in REQUEST_HISTOGRAMS.items() for x in row.read(whole.metrics))
        return "length" if any(o.finish_reason == "length" for o in whole.outputs) else "stop"

    def _finish(self, reply: Reply, outcome: str, cause: Exception | str = "") -> None:
        """Count a request that ended, and send its error where it did not end with a response."""
        self._metrics.add(**{outcome: 1})
        if outcome in ("stop", "length"):
            return
        try:
            code, message = _error_reply(outcome, cause)
            # Text that is not valid Unicode cannot be sent, and the server would wait for this answer until it ends.
            reply.fail(code, message.encode("utf-8", "backslashreplace")[:_MESSAGE_BYTES].decode("utf-8", "ignore"))
        except Exception:  # the server refused the answer, and the client cannot be reached otherwise
            _log.exception("a client could not be told that its request ended: %s", outcome)

    # On any thread.

    def _end(self, job: _Job, outcome: str) -> None:
        """Cancel a request's task with this outcome. A task that has not begun ends when it begins."""
        job.ended_by = outcome
        self._loop.call_soon_threadsafe(lambda: job.task and job.task.cancel())

    # On the watcher's thread.

    def _watch(self) -> None:
        while not self._closing.is_set():
            self._busy.wait()
            self._busy.clear()
            try:
                self._check_jobs()
            except Exception:  # later cancellations must still be noticed
                _log.exception("looking after the requests failed")
                self._busy.set()
            self._closing.wait(WATCH_S)

    def _check_jobs(self) -> None:
        """End cancelled and overdue requests, flush the metrics, and set `_busy` while there are requests."""
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            if job.ended_by is None and (outcome := self._outcome_to_end_with(job)) is not None:
                self._end(job, outcome)
        self._flush()
        if jobs or self._llm.running or self._llm.waiting:  # a cancelled request frees its slot a little later
            self._busy.set()

    def _outcome_to_end_with(self, job: _Job) -> str | None:
        if job.deadline is not None and time.monotonic() > job.deadline:
            return "timeout"
        return "cancelled" if job.reply.cancelled() else None

    def _flush(self) -> None:
        self._metrics.flush({name: row.read(self._llm) for name, row in ENGINE_GAUGES.items()})


def _error_reply(outcome: str, cause: Exception | str) -> tuple[Code, str]:
    """Code and message for the client of a request that did not finish, without a traceback or path of this machine."""
    if outcome == "cancelled":
        return "CANCELLED", "the request was cancelled"
    if outcome == "shutdown":
        return "UNAVAILABLE", "the model is being unloaded"
    if outcome == "refused":
        return "INVALID_ARG", str(cause)
    if outcome in ("overloaded", "timeout"):
        return "UNAVAILABLE", str(cause)
    if isinstance(cause, DDTreeError):
        return "INTERNAL", str(cause)
    return "INTERNAL", f"unexpected {type(cause).__name__}; the server's log says more"
