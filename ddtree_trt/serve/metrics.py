"""Prometheus metrics of one server.

Requests are counted when they end, on the engine's worker thread, so cancelled and failed ones are included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.runtime import figures
from ddtree_trt.runtime.async_llm import AsyncLLM
from ddtree_trt.runtime.request_maker import Request

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SECONDS_PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_RETRY_MEMORY = 0.9  # weight of the past in the mean duration behind Retry-After


class Metrics:
    """The server's registry: the table of figures, and counts of HTTP answers and ends of sequences.

    `finished` is called on the worker thread, everything else on the event loop.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        longest = 1 + manifest.drafting.longest_draft
        buckets: dict[figures.Unit, Sequence[float]] = {
            "seconds": _SECONDS,
            "seconds per token": _SECONDS_PER_TOKEN,
            "tokens": range(1, longest + 1),
        }
        self._finished = self._counter("requests_finished", "Sequences that ended, by reason.", "finish_reason")
        self._refused = self._counter("requests_refused", "HTTP requests answered with an error, by status.", "status")
        self._counters = [(row, self._counter(row.name, row.http)) for row in figures.COUNTERS if row.http]
        self._histograms = [
            (row, Histogram(row.published, row.http, buckets=buckets[row.unit], registry=self.registry))
            for row in figures.HISTOGRAMS
            if row.http
        ]
        self._mean_s = 0.0

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"ddtree_{name}", text, labels, registry=self.registry)

    def watch(self, llm: AsyncLLM) -> None:
        """Publish the gauges of an engine, read at each scrape."""
        for row in figures.GAUGES:
            if row.http:
                Gauge(row.published, row.http, registry=self.registry).set_function(partial(row.read, llm))

    def finished(self, request: Request) -> None:
        """Count a request that ended, for whatever reason."""
        for place, sequence in enumerate(request.sequences):
            metrics = sequence.metrics
            self._finished.labels("error" if sequence.error is not None else sequence.finish_reason).inc()
            for row, counter in self._counters:
                if place == 0 or not row.of_prompt:
                    counter.inc(row.read(metrics))
            for histogram_row, histogram in self._histograms:
                for value in histogram_row.read(metrics):
                    histogram.observe(value)
            if (total := metrics.latency_s) is not None:
                self._mean_s = total if not self._mean_s else _RETRY_MEMORY * self._mean_s + (1 - _RETRY_MEMORY) * total

    def refused(self, status: int) -> None:
        """Count a request that was answered with an error."""
        self._refused.labels(str(status)).inc()

    @property
    def retry_after_s(self) -> int:
        """The mean time of recent requests, their waits included, from 1 to 60: by then the queue has moved on."""
        return min(60, max(1, math.ceil(self._mean_s)))

    def page(self, accept: str) -> tuple[bytes, str]:
        """The metrics page in the best format that the scraper accepts, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
