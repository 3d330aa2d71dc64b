"""Figures of this server once more, under the names and labels that vLLM's servers give them.

For dashboards, autoscalers and benchmarks that read vLLM's metrics. Every alias repeats the samples of one of our
metrics at each scrape, so both always show the same figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

REQUEST_SUCCESS = "vllm:request_success"  # ends of sequences; the label is called `finished_reason`


class VllmNames(Collector):
    """The aliases of one server, with the labels `model_name` and `engine`."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._aliases: list[tuple[str, Collector, Mapping[str, str]]] = []

    def add(self, names: Sequence[str], metric: Collector, renamed: Mapping[str, str] | None = None) -> None:
        """Publish `metric` under further names, which lack the suffix `_total` of a counter. `renamed` maps our names
        of labels to vLLM's, where they differ."""
        self._aliases += [(name, metric, renamed or {}) for name in names]

    def collect(self) -> Iterator[Metric]:
        for name, metric, renamed in self._aliases:
            yield from self._repeated(name, metric.collect(), renamed)

    def _repeated(self, name: str, families: Iterable[Metric], renamed: Mapping[str, str]) -> Iterator[Metric]:
        for family in families:
            alias = Metric(name, family.documentation, family.type)
            for sample in family.samples:
                labels = {**self._labels, **{renamed.get(k, k): v for k, v in sample.labels.items()}}
                alias.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
            yield alias
