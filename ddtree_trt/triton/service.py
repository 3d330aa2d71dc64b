"""The engine behind one model instance: requests in, responses out, many at a time; and its metrics.

Two threads besides the server's: the engine's worker, and an event loop on which every request is a task that forwards
its parts. One task more ends cancelled requests and flushes the metrics, 20 times a second.

The Python backend's metric objects must not be used from two threads at once: that crashes the server. So requests add
to plain numbers, and one lock guards the flush, whose exchange with the server takes about 30 µs per metric.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from ddtree_trt import __version__
from ddtree_trt.errors import ArtifactError, DDTreeError, EngineError, MissingDependency, UsageError
from ddtree_trt.runtime.async_llm import AsyncLLM, QueueFull
from ddtree_trt.runtime.metric_table import COUNTERS, GAUGES, HISTOGRAMS, SECONDS, SECONDS_PER_TOKEN, Unit
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.request_maker import Request
from ddtree_trt.runtime.stats import RequestMetrics, merge
from ddtree_trt.triton.layouts import LAYOUTS, Layout
from ddtree_trt.triton.requests import Arrays, Call, response

# Outcomes of requests.
OUTCOMES = ("stop", "length", "cancelled", "timeout", "refused", "overloaded", "failed", "shutdown")

REQUESTS = "ddtree_requests_total"  # published beside the rows of the table
REQUEST_COUNTERS = {row.name: row for row in COUNTERS if row.triton}
ENGINE_GAUGES = {row.name: row for row in GAUGES if row.triton}
# Of whole requests: one of every round or token would cost an exchange with the server each.
REQUEST_HISTOGRAMS = {row.name: row for row in HISTOGRAMS if row.triton}
_BOUNDS: dict[Unit, Sequence[float]] = {"seconds": SECONDS, "seconds per token": SECONDS_PER_TOKEN}


class Metrics:
    """Counters, gauges and histograms of one model instance."""

    def __init__(self, family: Any, labels: Mapping[str, str]) -> None:
        """`family`: the server's `MetricFamily`. `labels`: of every sample, the instance's alone, or instances would
        overwrite each other's gauges. Raises EngineError if the server is too old to have histograms."""
        if not hasattr(family, "HISTOGRAM"):
            raise EngineError("this Triton server has no metrics that are histograms; use one of 24.10 or newer")
        self._families: list[Any] = []  # a family must outlive its metrics
        self._metrics: dict[str, Any] = {}
        self._pending: Counter[str] = Counter()
        self._observed: list[tuple[str, float]] = []
        self._gauges: Mapping[str, float] = {}  # as they were set last
        self._adding, self._flushing = threading.Lock(), threading.Lock()

        def made(kind: Any, name: str, text: str) -> Any:
            self._families.append(family(name=name, description=text, kind=kind))
            return self._families[-1]

        for kind, rows in ((family.COUNTER, REQUEST_COUNTERS), (family.GAUGE, ENGINE_GAUGES)):
            for name, row in rows.items():
                self._metrics[name] = made(kind, name, row.text).Metric(labels=dict(labels))
        for name, row in REQUEST_HISTOGRAMS.items():
            histogram = made(family.HISTOGRAM, name, row.text)
            self._metrics[name] = histogram.Metric(labels=dict(labels), buckets=list(_BOUNDS[row.unit]))
        ended = made(family.COUNTER, REQUESTS, "Requests that ended, by how.")
        for outcome in OUTCOMES:
            self._metrics[outcome] = ended.Metric(labels={**labels, "outcome": outcome})

    def count(self, figures: RequestMetrics) -> None:
        """Add the figures of a request that ended. Any thread may call it."""
        with self._adding:
            self._pending.update({name: row.read(figures) for name, row in REQUEST_COUNTERS.items()})
            for name, row in REQUEST_HISTOGRAMS.items():
                self._observed += [(name, value) for value in row.observations(figures)]

    def count_outcome(self, outcome: str) -> None:
        """Add a request to those of its outcome. Any thread may call it."""
        with self._adding:
            self._pending[outcome] += 1

    def flush(self, gauges: Mapping[str, float]) -> None:
        """Pass what has changed since the last flush to the server."""
        with self._adding:
            pending, self._pending = self._pending, Counter()
            observed, self._observed = self._observed, []
        with self._flushing:
            for name, amount in pending.items():
                if amount:
                    self._metrics[name].increment(amount)
            for name, value in observed:
                self._metrics[name].observe(value)
            for name, value in gauges.items() - self._gauges.items():
                self._metrics[name].set(value)
            self._gauges = gauges

    def close(self) -> None:
        """Release the metrics, before their families."""
        with self._flushing:
            self._metrics.clear()
            self._families.clear()


@dataclass(frozen=True)
class Settings:
    """The exported model's settings."""

    layout: Layout
    max_queue: int  # sequences that may wait for a slot
    threads: int  # CPU threads of the engine; 0 chooses
    outputs: frozenset[str]  # names the model declares

    @classmethod
    def read(cls, model_config: Mapping[str, Any]) -> Settings:
        """Read the `model_config` the server passes to `initialize`. Raises ArtifactError for a parameter that is
        missing or wrong, and where another version of ddtree-trt exported the model."""
        name = model_config["name"]
        given = {key: value["string_value"] for key, value in model_config.get("parameters", {}).items()}
        if (version := given.get("ddtree_trt_version")) != __version__:
            raise ArtifactError(
                f"model {name!r} was exported by ddtree-trt {version}, the server's Python ({sys.prefix}) has "
                f"{__version__}; install the former there, or export the model again with the latter"
            )
        layout, *numbers = (given.get(key, "") for key in ("layout", "max_queue", "threads"))
        if layout not in LAYOUTS or not all(number.isdecimal() for number in numbers):
            raise ArtifactError(
                f"config.pbtxt of {name!r}: layout must be one of {', '.join(LAYOUTS)}, max_queue and threads whole "
                f"numbers; found {given}"
            )
        outputs = frozenset(output["name"] for output in model_config["output"])
        return cls(LAYOUTS[layout], *map(int, numbers), outputs)  # type: ignore[call-arg, arg-type]


def select_device(kind: str, device_id: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Make the instance's GPU the only one its process sees; call before anything loads CUDA. Triton numbers the GPUs
    visible to it: where its CUDA_VISIBLE_DEVICES is set, the number is an index into that list."""
    if kind != "GPU":
        return
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(device_id)] if visible else device_id


WATCH_S = 0.05  # longest delay until a cancellation is noticed
_MESSAGE_BYTES = 1000  # of an error; what it repeats of a request is shorter
_log = logging.getLogger(__name__)
Code = Literal["INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL"]  # names of TritonError's codes
# Outcome of a request that did not finish → what its client gets.
_CODES: dict[str, Code] = {
    "cancelled": "CANCELLED",
    "timeout": "UNAVAILABLE",
    "refused": "INVALID_ARG",
    "overloaded": "UNAVAILABLE",
    "failed": "INTERNAL",
    "shutdown": "UNAVAILABLE",
}
_MESSAGES = {"cancelled": "the request was cancelled", "shutdown": "the model is being unloaded"}


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
    task: asyncio.Task[None]
    ended_by: str = "shutdown"  # the outcome, where the task is cancelled
    tokens: int = 0  # made so far

    def end(self, outcome: str) -> None:
        """Cancel the task with this outcome."""
        self.ended_by = outcome
        self.task.cancel()


class Service:
    """Runs requests on an engine until it is closed. Raises ArtifactError when the engine cannot be used."""

    def __init__(self, engine_dir: Path, settings: Settings, metrics: Metrics) -> None:
        """`metrics`: this instance's, closed with the service."""
        self._metrics = metrics
        self._llm = AsyncLLM(
            engine_dir, threads=settings.threads, max_waiting=settings.max_queue, on_finished=self._count
        )
        self._llm.core.maker.grammars.isolated = True
        self._layout = settings.layout
        self._jobs: set[_Job] = set()  # of the loop
        self._closed = False
        self._lock = threading.Lock()  # a request is begun before the service closes, or refused
        self._loop = asyncio.new_event_loop()
        self._forwarder = threading.Thread(target=self._loop.run_forever, name="ddtree-forward", daemon=True)
        self._watcher = self._loop.create_task(self._watch())
        self._flush()
        self._forwarder.start()

    def receive(self, parse: Callable[[], Call], reply: Reply) -> None:
        """Start the request that `parse` returns; responses and errors go to `reply`. Returns at once, and raises
        nothing: an exception would leave the other requests of the batch unanswered."""
        try:
            call = parse()
        except Exception as error:
            self._fail(reply, error)
            return
        with self._lock:
            closed = self._closed
            if not closed:
                asyncio.run_coroutine_threadsafe(self._serve(call, reply), self._loop)
        if closed:
            self._finish(reply, "shutdown")

    def close(self) -> None:
        """End every request, free the slots, release the engine and stop the threads."""
        with self._lock:
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
        self._llm.core.maker.grammars.close()
        self._llm.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._forwarder.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._flush()
        self._metrics.close()

    # On the event loop.

    async def _end_all(self) -> None:
        self._watcher.cancel()
        for job in self._jobs:
            job.end("shutdown")
        await asyncio.gather(self._watcher, *(job.task for job in self._jobs), return_exceptions=True)

    async def _serve(self, call: Call, reply: Reply) -> None:
        task = asyncio.current_task()
        assert task is not None
        job = _Job(call, reply, task)
        self._jobs.add(job)
        try:
            async with asyncio.timeout(call.timeout_s):
                outcome = await self._forward(job)
            self._finish(reply, outcome)
        except asyncio.CancelledError:
            self._finish(reply, job.ended_by)
        except TimeoutError:
            timeout_ms = 1000 * (call.timeout_s or 0)
            passed = f"the request's timeout of {timeout_ms:.0f} ms passed after {job.tokens} tokens"
            self._finish(reply, "timeout", passed)
        except Exception as error:  # of the engine or of this module too: the client must get an error
            self._fail(reply, error)
        finally:
            self._jobs.discard(job)

    async def _forward(self, job: _Job) -> str:
        """Send the request's responses; returns the outcome."""
        call = job.call
        whole: RequestOutput | None = None
        if call.params.structured is not None:  # compiling takes its time, which others should not wait
            await asyncio.to_thread(self._llm.core.maker.grammars.check, call.params.structured)
        with self._llm.submit(call.prompt, call.params) as submission:
            async for part in submission:
                whole = part if whole is None else whole.joined(part)
                job.tokens = part.metrics.output_tokens
                if call.stream or part.finished:
                    arrays = response(call, self._layout, part if call.stream else whole, whole)
                    job.reply.send(arrays, final=part.finished)
        assert whole is not None, "a request's last part always arrives"
        return "length" if any(o.finish_reason == "length" for o in whole.outputs) else "stop"

    async def _watch(self) -> None:
        while True:
            try:
                for job in await asyncio.to_thread(self._look_after, [*self._jobs]):
                    job.end("cancelled")
            except Exception:  # later cancellations must still be noticed
                _log.exception("looking after the requests failed")
            await asyncio.sleep(WATCH_S)

    # On any thread.

    def _count(self, request: Request) -> None:
        self._metrics.count(merge(sequence.metrics for sequence in request.sequences))

    def _look_after(self, jobs: list[_Job]) -> list[_Job]:
        """Flush the metrics; returns the jobs whose clients have gone. Both wait for the server."""
        self._flush()
        return [job for job in jobs if job.reply.cancelled()]

    def _flush(self) -> None:
        self._metrics.flush({name: row.read(self._llm) for name, row in ENGINE_GAUGES.items()})

    def _fail(self, reply: Reply, error: Exception) -> None:
        refused = isinstance(error, UsageError | MissingDependency)
        outcome = "refused" if refused else "overloaded" if isinstance(error, QueueFull) else "failed"
        if outcome == "failed":
            _log.error("a request failed", exc_info=error)
        self._finish(reply, outcome, error)

    def _finish(self, reply: Reply, outcome: str, cause: Exception | str = "") -> None:
        """Count a request that ended, and send its error, if any, without a traceback or path of this machine."""
        self._metrics.count_outcome(outcome)
        if outcome not in _CODES:
            return
        try:
            message = _MESSAGES.get(outcome) or str(cause)
            if isinstance(cause, Exception) and not isinstance(cause, DDTreeError):
                message = f"unexpected {type(cause).__name__}; the server's log says more"
            # Text that is not valid Unicode cannot be sent, and the server would wait for this answer until it ends.
            sent = message.encode("utf-8", "backslashreplace")[:_MESSAGE_BYTES].decode("utf-8", "ignore")
            reply.fail(_CODES[outcome], sent)
        except Exception:  # the server refused the answer, and the client cannot be reached otherwise
            _log.exception("a client could not be told that its request ended: %s", outcome)
