"""Metrics of one model instance on the server's metrics port.

The Python backend's metric objects must not be used from two threads at once: that crashes the server. So requests only
add to plain numbers, and one lock guards the flush that passes them to the server. That also keeps the exchange with
the server process, about 30 µs per metric, off the path of the tokens.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.metric_table import COUNTERS, GAUGES, HISTOGRAMS, SECONDS, SECONDS_PER_TOKEN, Unit

# Outcomes of requests.
OUTCOMES = ("stop", "length", "cancelled", "timeout", "refused", "overloaded", "failed", "shutdown")

# Published beside the rows of the table: the model's own counters.
REQUESTS = "ddtree_requests_total"
RESPONSES = "ddtree_responses_total"
REQUEST_COUNTERS = {row.name: row for row in COUNTERS if row.triton}
ENGINE_GAUGES = {row.name: row for row in GAUGES if row.triton}
# Of whole requests: one of every round or token would cost an exchange with the server each.
REQUEST_HISTOGRAMS = {row.name: row for row in HISTOGRAMS if row.triton}
_BOUNDS: dict[Unit, Sequence[float]] = {"seconds": SECONDS, "seconds per token": SECONDS_PER_TOKEN}


class Metrics:
    """Counters, gauges and histograms of one model instance.

    Args:
        family: `triton_python_backend_utils.MetricFamily`.
        labels: of every sample; they must be the instance's alone, or instances would overwrite each other's gauges.

    Raises EngineError if the server is too old to have histograms.
    """

    def __init__(self, family: Any, labels: Mapping[str, str]) -> None:
        if not hasattr(family, "HISTOGRAM"):
            raise EngineError("this Triton server has no metrics that are histograms; use one of 24.10 or newer")
        self._families: list[Any] = []  # a family must outlive its metrics
        self._metrics: dict[str, Any] = {}
        self._pending: Counter[str] = Counter()
        self._observed: list[tuple[str, float]] = []
        self._adding = threading.Lock()
        self._flushing = threading.Lock()
        for name, counter in REQUEST_COUNTERS.items():
            self._make(family, name, counter.text, family.COUNTER, {name: dict(labels)})
        text = "Responses sent, parts of streams included."
        self._make(family, RESPONSES, text, family.COUNTER, {RESPONSES: dict(labels)})
        for name, gauge in ENGINE_GAUGES.items():
            self._make(family, name, gauge.text, family.GAUGE, {name: dict(labels)})
        for name, row in REQUEST_HISTOGRAMS.items():
            bounds = list(_BOUNDS[row.unit])
            self._make(family, name, row.text, family.HISTOGRAM, {name: dict(labels)}, buckets=bounds)
        outcomes = {outcome: {**labels, "outcome": outcome} for outcome in OUTCOMES}
        self._make(family, REQUESTS, "Requests that ended, by how.", family.COUNTER, outcomes)

    def _make(
        self, family: Any, name: str, text: str, kind: Any, members: Mapping[str, dict[str, str]], **options: Any
    ) -> None:
        made = family(name=name, description=text, kind=kind)
        self._families.append(made)
        for key, labels in members.items():
            self._metrics[key] = made.Metric(labels=labels, **options)

    def add(self, **amounts: float) -> None:
        """Add to counters, by name, or to the requests of an outcome, by the outcome's name. Any thread may call it."""
        with self._adding:
            self._pending.update(amounts)

    def observe(self, observations: Iterable[tuple[str, float]]) -> None:
        """Add observations to histograms, by name. Any thread may call it."""
        with self._adding:
            self._observed += observations

    def flush(self, gauges: Mapping[str, float]) -> None:
        """Pass the amounts added since the last flush to the server, and set the gauges."""
        with self._adding:
            pending, self._pending = self._pending, Counter()
            observed, self._observed = self._observed, []
        with self._flushing:
            for name, amount in pending.items():
                if amount:
                    self._metrics[name].increment(amount)
            for name, value in observed:
                self._metrics[name].observe(value)
            for name, value in gauges.items():
                self._metrics[name].set(value)

    def close(self) -> None:
        """Release the metrics, before their families."""
        with self._flushing:
            self._metrics.clear()
            self._families.clear()
