"""Prometheus metrics of one server, and its log: a line about every request that ended, how many tokens, and how fast.

Requests are counted when they end, on the engine's worker thread, so cancelled and failed ones are included.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.runtime.async_llm import AsyncLLM
from ddtree_trt.runtime.metric_table import COUNTERS, GAUGES, HISTOGRAMS, POSITIONS, SECONDS, SECONDS_PER_TOKEN, Unit
from ddtree_trt.runtime.request_maker import Request
from ddtree_trt.runtime.stats import merge

PAGE_TYPE = CONTENT_TYPE_PLAIN_0_0_4
Made = TypeVar("Made", Counter, Gauge, Histogram)


class Metrics:
    """The server's registry. `finished` is called on the worker thread, everything else on the event loop."""

    def __init__(self, manifest: Manifest, model_name: str) -> None:
        disable_created_metrics()  # for each metric one more, of when it began: of use to nobody here
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._labels = {"model_name": model_name, "engine": "0"}  # vLLM's
        bounds = _bounds(manifest)
        self._ended = self._make(Counter, "vllm:request_success", "Sequences that ended, by reason.", "finished_reason")
        self._refused = self._make(
            Counter, "ddtree_requests_refused", "HTTP requests answered with an error, by status.", "status"
        )
        self._counters = [(row, self._make(Counter, row.name, row.text)) for row in COUNTERS]
        self._positions = [(row, self._make(Counter, row.name, row.text, "position")) for row in POSITIONS]
        self._histograms = [(r, self._make(Histogram, r.name, r.text, buckets=bounds[r.unit])) for r in HISTOGRAMS]
        for _, counter in self._positions:
            for position in range(manifest.drafting.longest_draft):
                counter(str(position))  # shown from the beginning, with 0

    def _make(self, kind: type[Made], name: str, text: str, *labels: str, **options: Any) -> Callable[..., Made]:
        """A metric as a function of the values of its labels."""
        made = kind(name, text, [*self._labels, *labels], registry=self.registry, **options)
        if not labels:
            made.labels(*self._labels.values())  # shown from the beginning
        return partial(made.labels, *self._labels.values())

    def watch(self, llm: AsyncLLM) -> None:
        """Publish the gauges of an engine, read at each scrape."""
        for row in GAUGES:
            self._make(Gauge, row.name, row.text)().set_function(partial(row.read, llm))

    def finished(self, request: Request) -> None:
        """Count a request that ended, for whatever reason."""
        for place, sequence in enumerate(request.sequences):
            metrics = sequence.metrics
            self._ended(sequence.finish_reason).inc()
            for row, counter in self._counters:
                if place == 0 or not row.of_prompt:
                    counter().inc(row.read(metrics))
            for row, counter in self._positions:
                for position, count in enumerate(row.observations(metrics)):
                    counter(str(position)).inc(count)
            for row, histogram in self._histograms:
                for value in row.observations(metrics):
                    histogram().observe(value)

    def refused(self, status: int) -> None:
        """Count a request that was answered with an error."""
        self._refused(str(status)).inc()

    def page(self) -> bytes:
        """The metrics page, of `PAGE_TYPE`."""
        return generate_latest(self.registry)


def _bounds(manifest: Manifest) -> dict[Unit, Sequence[float]]:
    rising = (step * 10**power for power in range(7) for step in (1, 2, 5))
    return {
        "seconds": SECONDS,
        "seconds per token": SECONDS_PER_TOKEN,
        "tokens of a round": range(1, 2 + manifest.drafting.longest_draft),
        "tokens of a request": [tokens for tokens in rising if tokens <= manifest.limits.max_seq_len],
    }


_log = logging.getLogger("ddtree_trt.requests")


def show_requests() -> None:
    """Have the lines written to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    _log.handlers, _log.propagate = [handler], False
    _log.setLevel(logging.INFO)


def log_request(request: Request) -> None:
    """Write the line of a request that ended, for whatever reason; its sequences are counted together."""
    metrics = merge(sequence.metrics for sequence in request.sequences)
    ends = sorted({"error" if s.error is not None else str(s.finish_reason) for s in request.sequences})
    parts = [f"{metrics.prompt_tokens} prompt tokens, {metrics.cached_tokens} cached", f"{metrics.output_tokens} new"]
    if (first := metrics.time_to_first_token_s) is not None:
        parts.append(f"first after {first:.3f} s")
    if seconds := metrics.inference_time_s:
        parts.append(f"{metrics.output_tokens / seconds:.1f} tokens/s")
    if metrics.rounds:
        parts.append(f"{metrics.mean_acceptance_length:.1f} a round")
    _log.info("%s: %s; %s", request.request_id, ", ".join(parts), ", ".join(ends))
