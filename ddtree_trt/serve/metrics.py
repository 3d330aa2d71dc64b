"""Prometheus metrics of one server.

Requests are counted when they end, on the engine's worker thread, so cancelled and failed ones are included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.runtime import figures
from ddtree_trt.runtime.async_llm import AsyncLLM
from ddtree_trt.runtime.request_maker import Request

_RETRY_MEMORY = 0.9  # weight of the past in the mean duration behind Retry-After
Row = TypeVar("Row", bound=figures.Figure)
Published = TypeVar("Published", Counter, Gauge, Histogram)


class Metrics:
    """The server's registry: the table of figures, and counts of HTTP answers and ends of sequences.

    With `vllm_model`, the name under which clients know the model, the figures that vLLM has too are also published
    under its names. `finished` is called on the worker thread, everything else on the event loop.
    """

    def __init__(self, manifest: Manifest, vllm_model: str | None = None) -> None:
        disable_created_metrics()  # for each figure one more, of when it began: of use to nobody here
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._vllm = None if vllm_model is None else _VllmNames(vllm_model)
        text = "Sequences that ended, by reason."
        self._finished = Counter("ddtree_requests_finished", text, ["finish_reason"], registry=self.registry)
        self._refused = Counter(
            "ddtree_requests_refused",
            "HTTP requests answered with an error, by status.",
            ["status"],
            registry=self.registry,
        )
        self._counters = [(row, self._publish(row, Counter)) for row in self._published(figures.COUNTERS)]
        self._positions = [
            (row, self._publish(row, Counter, labelnames=["position"])) for row in self._published(figures.POSITIONS)
        ]
        rising = (step * 10**power for power in range(7) for step in (1, 2, 5))
        buckets: dict[figures.Unit, Sequence[float]] = {
            "seconds": figures.SECONDS,
            "seconds per token": figures.SECONDS_PER_TOKEN,
            "tokens": range(1, 2 + manifest.drafting.longest_draft),
            "tokens of a request": [tokens for tokens in rising if tokens <= manifest.limits.max_seq_len],
        }
        self._histograms = [
            (row, self._publish(row, Histogram, buckets=buckets[row.unit]))
            for row in self._published(figures.HISTOGRAMS)
        ]
        for _, counter in self._positions:
            for position in range(manifest.drafting.longest_draft):
                counter.labels(str(position))  # shown from the beginning, with 0
        if self._vllm is not None:
            self._vllm.add(["vllm:request_success"], self._finished, {"finish_reason": "finished_reason"})
            self.registry.register(self._vllm)
        self._mean_s = 0.0

    def _published(self, rows: Sequence[Row]) -> list[Row]:
        return [row for row in rows if row.http or (row.vllm and self._vllm is not None)]

    def _publish(self, row: figures.Figure, kind: type[Published], **options: Any) -> Published:
        """The metric of a row, under our name unless only vLLM has it, and under vLLM's where that was asked for."""
        text, registry = (row.http, self.registry) if row.http else (row.name.replace("_", " ").capitalize(), None)
        metric = kind(f"ddtree_{row.name}", text, registry=registry, **options)
        if self._vllm is not None:
            self._vllm.add(row.vllm, metric)
        return metric

    def watch(self, llm: AsyncLLM) -> None:
        """Publish the gauges of an engine, read at each scrape."""
        for row in self._published(figures.GAUGES):
            self._publish(row, Gauge).set_function(partial(row.read, llm))

    def finished(self, request: Request) -> None:
        """Count a request that ended, for whatever reason."""
        for place, sequence in enumerate(request.sequences):
            metrics = sequence.metrics
            self._finished.labels(sequence.finish_reason).inc()
            for row, counter in self._counters:
                if place == 0 or not row.of_prompt:
                    counter.inc(row.read(metrics))
            for positions_row, counter in self._positions:
                for position, count in enumerate(positions_row.read(metrics)):
                    counter.labels(str(position)).inc(count)
            for histogram_row, histogram in self._histograms:
                for value in histogram_row.read(metrics):
                    histogram.observe(value)
            if (took := metrics.latency_s) is not None:
                self._mean_s = took if not self._mean_s else _RETRY_MEMORY * self._mean_s + (1 - _RETRY_MEMORY) * took

    def refused(self, status: int) -> None:
        """Count a request that was answered with an error."""
        self._refused.labels(str(status)).inc()

    @property
    def retry_after_s(self) -> int:
        """The mean time of recent requests, their waits included, from 1 to 60: by then the queue has moved on."""
        return min(60, max(1, math.ceil(self._mean_s)))

    def page(self, accept: str) -> tuple[bytes, str]:
        """The metrics page in the best format that the scraper accepts, and its content type."""
        encode, content_type = page_encoder(accept)
        return encode(self.registry), content_type


class _VllmNames(Collector):
    """Figures once more, under the names and labels that vLLM's servers give them, for dashboards, autoscalers and
    benchmarks that read these: each repeats the samples of one of our metrics at each scrape."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._aliases: list[tuple[str, Collector, Mapping[str, str]]] = []

    def add(self, names: Sequence[str], metric: Collector, renamed: Mapping[str, str] | None = None) -> None:
        """Publish `metric` under further names, which lack the suffix `_total` of a counter. `renamed` maps our names
        of labels to vLLM's, where they differ."""
        self._aliases += [(name, metric, renamed or {}) for name in names]

    def collect(self) -> Iterator[Metric]:
        for name, metric, renamed in self._aliases:
            for family in metric.collect():
                alias = Metric(name, family.documentation, family.type)
                for sample in family.samples:
                    labels = {**self._labels, **{renamed.get(k, k): v for k, v in sample.labels.items()}}
                    alias.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
                yield alias


def page_encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """The encoder of the best format that a scraper accepts, and its content type. A colon is a letter of names, as in
    vLLM's: it is not escaped, whether or not the scraper says so."""
    kinds = [kind.strip() for kind in accept.split(",")]
    plain = "application/openmetrics-text"
    unescaped = [f"{k}; escaping=allow-utf-8" if k.startswith(plain) and "escaping=" not in k else k for k in kinds]
    return choose_encoder(", ".join(unescaped))
