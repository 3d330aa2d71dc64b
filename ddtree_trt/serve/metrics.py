"""Prometheus metrics of one server.

Counted where requests end, on the engine's worker thread, so that cancelled and failed ones count like any other.
"""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.runtime.async_llm import AsyncLLM
from ddtree_trt.runtime.request_maker import Request

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SECONDS_PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_LONGEST_CHAIN = 16  # acceptance-length buckets where the drafter has no block size
_RETRY_MEMORY = 0.9  # weight of the past in the mean duration behind Retry-After


class Metrics:
    """The server's registry. `finished` is called on the worker thread, everything else on the event loop."""

    def __init__(self, manifest: Manifest) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        longest = manifest.drafting.block_size or _LONGEST_CHAIN

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ddtree_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"ddtree_{name}", text, buckets=buckets, registry=self.registry)

        self._finished = counter("requests_finished", "Sequences that ended, by reason.", "finish_reason")
        self._refused = counter("requests_refused", "HTTP requests answered with an error, by status.", "status")
        self._prompt = counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._cached = counter("prompt_tokens_cached", "Of these, found in a slot's cache.")
        self._output = counter("generation_tokens", "Tokens generated.")
        self._rounds = counter("rounds", "Decode rounds.")
        self._device_rounds = counter("rounds_on_device", "Of these, without the host.")
        self._drafted = counter("draft_tokens", "Draft tokens verified.")
        self._accepted = counter("draft_tokens_accepted", "Draft tokens that became output.")
        self._ttft = histogram("time_to_first_token_seconds", "From submission to the first token.", _SECONDS)
        self._tpot = histogram("time_per_output_token_seconds", "Mean, after the first token.", _SECONDS_PER_TOKEN)
        self._e2e = histogram("e2e_request_latency_seconds", "From submission to the last token.", _SECONDS)
        buckets = tuple(float(n) for n in range(1, longest + 1))
        self._acceptance = histogram("acceptance_length", "Tokens committed per round.", buckets)
        self._mean_s = 0.0

    def watch(self, llm: AsyncLLM) -> None:
        """Show what the engine is doing at the moment of a scrape."""
        for name, text, read in (
            ("requests_running", "Sequences that hold a slot.", lambda: llm.running),
            ("requests_waiting", "Sequences that wait for a slot.", lambda: llm.waiting),
            ("slots", "Sequences that can run at a time.", lambda: llm.slots),
        ):
            Gauge(f"ddtree_{name}", text, registry=self.registry).set_function(read)

    def finished(self, request: Request) -> None:
        """Count a request that ended, in whatever way."""
        self._prompt.inc(len(request.prompt_ids))
        for s in request.sequences:
            m = s.metrics
            self._finished.labels("error" if s.error is not None else s.finish_reason).inc()
            self._cached.inc(m.cached_tokens)
            self._output.inc(m.output_tokens)
            self._rounds.inc(m.rounds)
            self._device_rounds.inc(m.rounds if m.on_device else 0)
            self._drafted.inc(m.drafted_tokens)
            self._accepted.inc(m.accepted_tokens)
            for length in m.acceptance_lengths:
                self._acceptance.observe(length)
            if m.time_to_first_token_s is not None and m.last_token_s is not None:
                total = m.last_token_s - m.arrival_s
                self._ttft.observe(m.time_to_first_token_s)
                self._e2e.observe(total)
                self._mean_s = total if not self._mean_s else _RETRY_MEMORY * self._mean_s + (1 - _RETRY_MEMORY) * total
            if m.time_per_output_token_s is not None:
                self._tpot.observe(m.time_per_output_token_s)

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    @property
    def retry_after_s(self) -> int:
        """About as long as a request has lately taken, its wait included: by then the queue has moved on. 1 to 60."""
        return min(60, max(1, math.ceil(self._mean_s)))

    def page(self, accept: str) -> tuple[bytes, str]:
        """The metrics page in the best format the scraper takes, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
