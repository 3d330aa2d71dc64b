"""One metrics page of several: every sample gets a label that names its replica."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from ddtree_trt.serve.metrics import page_encoder

ACCEPT = "application/openmetrics-text; version=1.0.0; escaping=allow-utf-8"  # the format `merge` reads
LABEL = "replica"


def merge(pages: Sequence[tuple[str, str]], accept: str) -> tuple[bytes, str]:
    """The page of all replicas, in the best format that the scraper accepts, and its content type.

    Args:
        pages: the name of each replica and its page, in OpenMetrics' format.
    """
    encode, content_type = page_encoder(accept)
    registry = CollectorRegistry()
    registry.register(_Pages(pages))
    return encode(registry), content_type


class _Pages:
    """A collector of the samples of several pages."""

    def __init__(self, pages: Iterable[tuple[str, str]]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, page in self._pages:
            for family in text_string_to_metric_families(page):
                whole = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type, family.unit)
                )
                for sample in family.samples:
                    whole.samples.append(sample._replace(labels={LABEL: replica, **sample.labels}))
        yield from families.values()
