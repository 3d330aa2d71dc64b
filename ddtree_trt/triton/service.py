"""The engine behind one model instance: requests in, responses out, many at a time.

Three threads beside the server's: the engine's worker, an event loop on which every request is a task that forwards
parts as they come, and a watcher that looks for cancelled and overdue requests and flushes the metrics. The watcher
sleeps while nothing is under way.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from ddtree_trt.errors import DDTreeError, UsageError
from ddtree_trt.runtime.async_llm import AsyncLLM, QueueFull
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.triton.metrics import Metrics
from ddtree_trt.triton.requests import Call
from ddtree_trt.triton.responses import Arrays, Responder
from ddtree_trt.triton.settings import Settings

WATCH_S = 0.05  # how late a cancellation or a deadline may be noticed
_log = logging.getLogger(__name__)
Code = Literal["INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL"]  # names of TritonError's codes


class Reply(Protocol):
    """The way back to one request's client. `cancelled` is asked by another thread than the one that sends."""

    def send(self, arrays: Arrays, *, final: bool) -> None:
        """Send a response."""

    def fail(self, code: Code, message: str) -> None:
        """Send an error as the last response."""

    def cancelled(self) -> bool:
        """Whether the client has gone away."""


@dataclass(eq=False)
class _Job:
    call: Call
    reply: Reply
    responder: Responder
    deadline: float | None  # time.monotonic()
    future: Future[None] | None = None
    task: asyncio.Task[None] | None = None  # set by the task itself, on the loop
    ended_by: str | None = None  # the outcome another thread has decided on
    seen: Counter[str] = field(default_factory=Counter)  # what the metrics have of this request

    def progress(self, part: RequestOutput) -> Counter[str]:
        """The counters' growth since the last call."""
        m = part.metrics
        now = Counter(
            ddtree_prompt_tokens_total=m.prompt_tokens,
            ddtree_generation_tokens_total=m.output_tokens,
            ddtree_rounds_total=m.rounds,
            ddtree_draft_tokens_total=m.drafted_tokens,
            ddtree_draft_tokens_accepted_total=m.accepted_tokens,
        )
        grown, self.seen = now - self.seen, now
        return grown


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
        self._layout, self._metrics = settings.layout, metrics
        self._jobs: set[_Job] = set()
        self._lock = threading.Lock()  # guards _jobs and the start of a job against closing
        self._busy, self._closing = threading.Event(), threading.Event()
        self._loop = asyncio.new_event_loop()
        self._forwarder = threading.Thread(target=self._loop.run_forever, name="ddtree-forward", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="ddtree-watch", daemon=True)
        self._flush()
        self._forwarder.start()
        self._watcher.start()

    def accept(self, call: Call, reply: Reply) -> None:
        """Start a request; everything else happens through `reply`. Returns at once."""
        deadline = None if call.timeout_s is None else time.monotonic() + call.timeout_s
        job = _Job(call, reply, Responder(call, self._layout), deadline)
        with self._lock:
            closing = self._closing.is_set()
            if not closing:
                self._jobs.add(job)
                job.future = asyncio.run_coroutine_threadsafe(self._serve(job), self._loop)
        if closing:
            self._finish(job, "shutdown")
        self._busy.set()

    def refuse(self, error: UsageError, reply: Reply) -> None:
        """Answer a request that could not be understood."""
        self._metrics.add(refused=1)
        self._busy.set()
        reply.fail("INVALID_ARG", str(error))

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
            self._finish(job, await self._forward(job))
        except asyncio.CancelledError:
            self._finish(job, job.ended_by or "shutdown")
        except UsageError as error:
            self._finish(job, "refused", error)
        except QueueFull as error:
            self._finish(job, "overloaded", error)
        except Exception as error:  # the engine's failure, or ours: the client must hear of either
            _log.exception("a request failed")
            self._finish(job, "failed", error)
        finally:
            with self._lock:
                self._jobs.discard(job)
            self._busy.set()

    async def _forward(self, job: _Job) -> str:
        """Send what comes; returns the outcome."""
        whole: RequestOutput | None = None
        with self._llm.submit(job.call.prompt, job.call.params) as submission:
            async for part in submission:
                started, cpu = time.perf_counter(), time.thread_time()
                whole = part if whole is None or job.call.stream else whole.joined(part)
                grown = job.progress(part)
                if job.call.stream or part.finished:
                    job.reply.send(job.responder.arrays(whole), final=part.finished)
                    grown["ddtree_responses_total"] = 1
                spent = {
                    "ddtree_forward_seconds_total": time.perf_counter() - started,
                    "ddtree_forward_cpu_seconds_total": time.thread_time() - cpu,
                }
                self._metrics.add(**grown, **spent)
        assert whole is not None, "a request's last part always arrives"
        return "length" if any(o.finish_reason == "length" for o in whole.outputs) else "stop"

    def _finish(self, job: _Job, outcome: str, error: Exception | None = None) -> None:
        """Count a request that ended, and tell the client unless the last response has."""
        self._metrics.add(**{outcome: 1})
        try:
            if (answer := self._last_words(job, outcome, error)) is not None:
                job.reply.fail(*answer)
        except Exception:  # the server would not take it; there is no one else to tell
            _log.exception("a client could not be told that its request ended: %s", outcome)

    def _last_words(self, job: _Job, outcome: str, error: Exception | None) -> tuple[Code, str] | None:
        if outcome in ("stop", "length"):
            return None
        if outcome == "cancelled":
            return "CANCELLED", "the request was cancelled"
        if outcome == "timeout":
            timeout, tokens = (job.call.timeout_s or 0) * 1000, job.seen["ddtree_generation_tokens_total"]
            return "UNAVAILABLE", f"the request's timeout of {timeout:.0f} ms passed after {tokens} tokens"
        if outcome == "shutdown":
            return "UNAVAILABLE", "the model is being unloaded"
        if outcome == "refused":
            return "INVALID_ARG", str(error)
        if outcome == "overloaded":
            return "UNAVAILABLE", str(error)
        return "INTERNAL", str(error) if isinstance(error, DDTreeError) else f"{type(error).__name__}: {error}"

    # On any thread.

    def _end(self, job: _Job, outcome: str) -> None:
        """Have a request's task end with this outcome; one that has not begun sees it when it does."""
        job.ended_by = outcome
        self._loop.call_soon_threadsafe(lambda: job.task and job.task.cancel())

    # On the watcher's thread.

    def _watch(self) -> None:
        while not self._closing.is_set():
            self._busy.wait()
            self._busy.clear()
            try:
                self._look()
            except Exception:  # cancellations must go on being noticed
                _log.exception("looking after the requests failed")
                self._busy.set()
            self._closing.wait(WATCH_S)

    def _look(self) -> None:
        """End what is cancelled or overdue, hand on the metrics, and ask to be called again while there is work."""
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            if job.ended_by is None and (outcome := self._ending(job)) is not None:
                self._end(job, outcome)
        self._flush()
        if jobs or self._llm.running or self._llm.waiting:  # a cancelled request frees its slot a little later
            self._busy.set()

    def _ending(self, job: _Job) -> str | None:
        if job.deadline is not None and time.monotonic() > job.deadline:
            return "timeout"
        return "cancelled" if job.reply.cancelled() else None

    def _flush(self) -> None:
        llm = self._llm
        gauges = {
            "ddtree_slots": llm.slots,
            "ddtree_requests_running": llm.running,
            "ddtree_requests_waiting": llm.waiting,
            "ddtree_engine_failed": int(llm.failure is not None),
        }
        self._metrics.flush(gauges)
