"""Figures for the server's metrics port.

The Python backend's metric objects must not be used from two threads at once: that ends the server. So requests only
add to plain numbers, and one lock guards the flush that hands them on. It also keeps the exchange with the server
process, some 30 µs a metric, off the path of the tokens.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

# A request ends in one of these ways.
OUTCOMES = ("stop", "length", "cancelled", "timeout", "refused", "overloaded", "failed", "shutdown")

# Names that the HTTP server's metrics also have mean the same there.
REQUESTS = "ddtree_requests_total"
COUNTERS = {
    "ddtree_prompt_tokens_total": "Prompt tokens of started requests",
    "ddtree_generation_tokens_total": "Generated tokens",
    "ddtree_rounds_total": "Decoding rounds, counted per sequence",
    "ddtree_draft_tokens_total": "Draft tokens verified; over the rounds: the tree budget in use",
    "ddtree_draft_tokens_accepted_total": "Draft tokens accepted; over the rounds: accepted per round",
    "ddtree_responses_total": "Responses sent, parts of streams included",
    "ddtree_forward_seconds_total": "Seconds spent making and sending responses, waits for the server included",
    "ddtree_forward_cpu_seconds_total": "Processor seconds of the same",
}
GAUGES = {
    "ddtree_slots": "Sequences that can run at a time",
    "ddtree_requests_running": "Sequences that hold a slot",
    "ddtree_requests_waiting": "Sequences that wait for a slot",
    "ddtree_engine_failed": "1 when the engine stopped for good and the model must be reloaded",
}


class Metrics:
    """Counters and gauges of one model instance.

    Args:
        family: `triton_python_backend_utils.MetricFamily`.
        labels: of every sample; they must be the instance's alone, or instances would overwrite each other's gauges.
    """

    def __init__(self, family: Any, labels: Mapping[str, str]) -> None:
        self._families: list[Any] = []  # a family must outlive its metrics
        self._metrics: dict[str, Any] = {}
        self._pending: Counter[str] = Counter()
        self._adding, self._flushing = threading.Lock(), threading.Lock()
        for name, text in COUNTERS.items():
            self._make(family, name, text, family.COUNTER, {name: dict(labels)})
        for name, text in GAUGES.items():
            self._make(family, name, text, family.GAUGE, {name: dict(labels)})
        outcomes = {outcome: {**labels, "outcome": outcome} for outcome in OUTCOMES}
        self._make(family, REQUESTS, "Requests that ended, by how", family.COUNTER, outcomes)

    def _make(self, family: Any, name: str, text: str, kind: Any, members: Mapping[str, dict[str, str]]) -> None:
        made = family(name=name, description=text, kind=kind)
        self._families.append(made)
        for key, labels in members.items():
            self._metrics[key] = made.Metric(labels=labels)

    def add(self, **amounts: float) -> None:
        """Add to counters, by name, or to the requests of an outcome, by the outcome's name. Any thread may call it."""
        with self._adding:
            self._pending.update(amounts)

    def flush(self, gauges: Mapping[str, float]) -> None:
        """Hand everything added since the last flush to the server, and set the gauges."""
        with self._adding:
            pending, self._pending = self._pending, Counter()
        with self._flushing:
            for name, amount in pending.items():
                if amount:
                    self._metrics[name].increment(amount)
            for name, value in gauges.items():
                self._metrics[name].set(value)

    def close(self) -> None:
        """Give the metrics back to the server, before their families."""
        with self._flushing:
            self._metrics.clear()
            self._families.clear()
