"""The table of metrics: what the HTTP server and the Triton model publish of it, and what their pages say."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client.metrics_core as core
import pytest
from fake_triton import backend_utils

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.decoding.budget.policy import Decision
from ddtree_trt.runtime.metric_table import COUNTERS, GAUGES, HISTOGRAMS, POSITIONS, MetricSpec
from ddtree_trt.runtime.stats import RequestMetrics, merge
from ddtree_trt.serve.metrics import Metrics as HttpMetrics
from ddtree_trt.triton import service as triton

DOCS = Path(__file__).resolve().parents[2] / "docs"
KINDS: dict[str, tuple[MetricSpec, str]] = {
    row.name: (row, kind)
    for kind, rows in (("counter", COUNTERS), ("counter", POSITIONS), ("histogram", HISTOGRAMS), ("gauge", GAUGES))
    for row in rows
}
SCHEDULER = SimpleNamespace(cache_usage=0.25)
ENGINE: Any = SimpleNamespace(running=1, waiting=2, slots=3, failed=True, core=SimpleNamespace(scheduler=SCHEDULER))
# What each publishes beside the table.
HTTP_ALONE = {"vllm:request_success_total", "ddtree_requests_refused_total"}
TRITON_ALONE = {triton.REQUESTS}


def metrics_of(accepted: list[int], **others: Any) -> RequestMetrics:
    """Figures of a sequence whose rounds drafted 8 tokens each, committed these and ended half a second apart; one more
    round drafted nothing. Budgets were chosen by costs of 8 ms, or 5 for a single token."""
    tokens = 2 + sum(accepted)
    made = RequestMetrics(arrival_s=1.0, scheduled_s=1.25, first_token_s=1.5, output_tokens=tokens, **others)
    for place, committed in enumerate([*accepted, 1]):
        made.last_token_s = 2.0 + place / 2
        drafted = place < len(accepted)
        made.add_round(
            committed, 8 * drafted, Decision(8, 2.5, 0.008, 0.005, drafted=drafted, probe=drafted and not place)
        )
    return made


PARTS = [
    metrics_of([3, 1], prompt_tokens=7, cached_tokens=0, on_device=True, rounds_on_device=3),
    metrics_of([2], prompt_tokens=7, cached_tokens=6, on_device=True, rounds_on_device=2),
]


@pytest.fixture
def http(tiny_engine: Path) -> dict[str, core.Metric]:
    """The HTTP server's families after a request of two sequences, by the name that a scrape shows."""
    metrics = HttpMetrics(load_manifest(tiny_engine), "a model")
    metrics.watch(ENGINE)
    sequences = [SimpleNamespace(metrics=part, error=None, finish_reason="stop") for part in PARTS]
    request: Any = SimpleNamespace(prompt_ids=[5] * 7, sequences=sequences)
    metrics.finished(request)
    families = [f for f in metrics.registry.collect() if not f.name.startswith("process_")]
    return {f.name + ("_total" if f.type == "counter" else ""): f for f in families}


@pytest.fixture
def published() -> dict[str, float]:
    """What the Triton model publishes after that request."""
    found: dict[str, float] = {}
    metrics = triton.Metrics(backend_utils(found).MetricFamily, {})
    metrics.count(merge(PARTS))
    metrics.flush({name: row.read(ENGINE) for name, row in triton.ENGINE_GAUGES.items()})
    return found


def test_a_server_without_histograms_is_named() -> None:
    with pytest.raises(EngineError, match=r"24\.10"):
        triton.Metrics(SimpleNamespace(COUNTER="counter", GAUGE="gauge"), {})


def test_both_publish_the_table(http: dict[str, core.Metric], published: dict[str, float]) -> None:
    rows = {name: (row.text, kind) for name, (row, kind) in KINDS.items()}
    assert {n: (f.documentation, f.type) for n, f in http.items() if n not in HTTP_ALONE} == rows
    labels = {"model_name": "a model", "engine": "0"}
    assert all(labels.items() <= s.labels.items() for family in http.values() for s in family.samples)
    assert published.keys() - {*triton.OUTCOMES} == {name for name, (row, _) in KINDS.items() if row.triton}
    for name, (row, kind) in KINDS.items():
        if row.triton and kind != "histogram":
            (sample,) = (s for s in http[name].samples if s.name == name)
            assert sample.value == published[name] > 0


def test_values(http: dict[str, core.Metric]) -> None:
    samples = {s.name: s.value for family in http.values() for s in family.samples if "le" not in s.labels}
    expected = {
        "vllm:prompt_tokens_total": 7,  # of the request, not of each sequence
        "vllm:prefix_cache_hits_total": 6,
        "vllm:prefix_cache_queries_total": 14,
        "vllm:request_success_total": 2,
        "vllm:request_inference_time_seconds_sum": 3.0,
        "vllm:request_prompt_tokens_sum": 14,
        "vllm:generation_tokens_total": 10,
        "vllm:spec_decode_num_drafts_total": 3,
        "vllm:spec_decode_num_draft_tokens_total": 24,
        "vllm:spec_decode_num_accepted_tokens_total": 3,
        "vllm:time_to_first_token_seconds_sum": 1.0,
        "vllm:request_time_per_output_token_seconds_sum": 1.5 / 5 + 1.0 / 3,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:inter_token_latency_seconds_sum": 5 * 0.5,
        "vllm:inter_token_latency_seconds_count": 5,
        "ddtree_auto_rounds_total": 5,
        "ddtree_auto_rounds_probing_total": 2,
        "ddtree_auto_expected_tokens_total": 7.5,
        "ddtree_auto_committed_tokens_total": 6,
        "ddtree_acceptance_length_sum": 8,
        "vllm:kv_cache_usage_perc": 0.25,
    }
    assert {name: samples[name] for name in expected} == pytest.approx(expected)
    positions = http["vllm:spec_decode_num_accepted_tokens_per_pos_total"].samples
    counts = {int(s.labels["position"]): s.value for s in positions if s.name.endswith("_total")}
    assert {p: n for p, n in counts.items() if n} == {0: 2, 1: 1} and len(counts) == 15


def test_reasons_of_budgets_are_summed_and_copied() -> None:
    part = metrics_of([3])
    whole, alone, before = merge([part, metrics_of([2, 1])]), merge([part]), part.automatic.rounds
    part.add_round(1, 0, Decision(0, 1.0, 0.005, 0.005, drafted=False))
    assert (whole.automatic.rounds, whole.automatic.committed_tokens, whole.automatic.probes) == (5, 6, 2)
    assert alone.automatic.rounds == before == part.automatic.rounds - 1
    assert alone.acceptance_lengths == [3, 1] and part.acceptance_lengths == [3, 1, 1]
    assert alone._history is part._history, "a part copies no list that grows with the rounds"
    assert whole.acceptance_lengths == [3, 1, 2, 1, 1] and whole.budgets == [8, 0, 8, 8, 0]


@pytest.mark.parametrize(
    ("page", "every", "alone"), [("serving.md", True, HTTP_ALONE), ("deployment.md", False, TRITON_ALONE)]
)
def test_the_documents_list_what_is_published(page: str, every: bool, alone: set[str]) -> None:
    section = (DOCS / page).read_text(encoding="utf-8").split("\n## Metrics\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    listed = [name for cell in rows for name in re.findall(r"`((?:ddtree_|vllm:)\w+)(?:\{\w+\})?`", cell)]
    assert len(listed) == len(set(listed))
    assert set(listed) == alone | {name for name, (row, _) in KINDS.items() if every or row.triton}
