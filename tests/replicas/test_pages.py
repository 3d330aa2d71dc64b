"""One metrics page of several, and names with a colon for every scraper."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter

from ddtree_trt.replicas.pages import ACCEPT, merge
from ddtree_trt.serve.metrics import page_encoder

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def page(accept: str) -> str:
    registry = CollectorRegistry()
    Counter("vllm:prompt_tokens", "Tokens of prompts.", registry=registry).inc(3)
    encode, _ = page_encoder(accept)
    return encode(registry).decode()


@pytest.mark.parametrize("accept", ["", "text/plain", OPENMETRICS, f"{OPENMETRICS}; escaping=allow-utf-8", ACCEPT])
def test_a_colon_stays_in_names(accept: str) -> None:
    assert "\nvllm:prompt_tokens_total 3.0" in page(accept)


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_pages_are_merged_with_their_names(accept: str) -> None:
    text, _ = merge([("a", page(ACCEPT)), ("b", page(ACCEPT))], accept)
    for replica in "ab":
        assert f'\nvllm:prompt_tokens_total{{replica="{replica}"}} 3.0' in text.decode()
