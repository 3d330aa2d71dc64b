"""The table of figures: what the HTTP server and the Triton model publish of it, and what their pages say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import prometheus_client.metrics_core as core
import pytest

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.runtime.decoding.budget.policy import Decision
from ddtree_trt.runtime.figures import COUNTERS, GAUGES, HISTOGRAMS, POSITIONS, SECONDS, SECONDS_PER_TOKEN, Figure
from ddtree_trt.runtime.stats import AutomaticRounds, RequestMetrics, merge
from ddtree_trt.serve.metrics import Metrics as HttpMetrics
from ddtree_trt.triton import metrics as triton

DOCS = Path(__file__).resolve().parents[2] / "docs"
FIGURES: tuple[Figure, ...] = (*COUNTERS, *POSITIONS, *HISTOGRAMS, *GAUGES)
KINDS: dict[Figure, str] = {
    row: kind
    for kind, rows in (("counter", COUNTERS + POSITIONS), ("histogram", HISTOGRAMS), ("gauge", GAUGES))
    for row in rows
}
ENGINE: Any = SimpleNamespace(running=1, waiting=2, slots=3, cache_usage=0.25, failure=ValueError())
# What each publishes beside the table.
HTTP_ALONE = {"ddtree_requests_finished_total", "ddtree_requests_refused_total"}
TRITON_ALONE = {triton.REQUESTS, triton.RESPONSES, triton.FORWARD_SECONDS, triton.FORWARD_CPU_SECONDS}


class Family:
    """Triton's MetricFamily, which keeps what was made and set."""

    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    made: ClassVar[dict[str, Family]]

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.made[name] = self
        self.text, self.kind, self.value = description, kind, 0.0

    def Metric(self, labels: dict[str, str], buckets: Sequence[float] = ()) -> Family:
        assert list(buckets) == sorted(set(buckets))
        return self

    def increment(self, amount: float) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value

    def observe(self, value: float) -> None:
        self.value += value


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
    metrics_of([3, 1], prompt_tokens=7, cached_tokens=0, on_device=True),
    metrics_of([2], prompt_tokens=7, cached_tokens=6, on_device=True),
]


@pytest.fixture
def http(tiny_engine: Path) -> dict[str, core.Metric]:
    """The HTTP server's families after a request of two sequences, by the name that a scrape shows."""
    return scraped(tiny_engine, "ddtree_")


@pytest.fixture
def vllm(tiny_engine: Path) -> dict[str, core.Metric]:
    """The same under vLLM's names."""
    return scraped(tiny_engine, "vllm:", "a model")


def scraped(engine: Path, prefix: str, vllm_model: str | None = None) -> dict[str, core.Metric]:
    metrics = HttpMetrics(load_manifest(engine), vllm_model)
    metrics.watch(ENGINE)
    sequences = [SimpleNamespace(metrics=part, error=None, finish_reason="stop") for part in PARTS]
    request: Any = SimpleNamespace(prompt_ids=[5] * 7, sequences=sequences)
    metrics.finished(request)
    families = [f for f in metrics.registry.collect() if f.name.startswith(prefix)]
    return {f.name + ("_total" if f.type == "counter" else ""): f for f in families}


@pytest.fixture
def families() -> dict[str, Family]:
    class Own(Family):
        made: ClassVar[dict[str, Family]] = {}

    metrics = triton.Metrics(Own, {})
    whole = merge(PARTS)
    metrics.add(**{name: row.read(whole) for name, row in triton.REQUEST_FIGURES.items()})
    metrics.observe((name, value) for name, row in triton.HISTOGRAMS.items() for value in row.read(whole))
    metrics.flush({name: row.read(ENGINE) for name, row in triton.ENGINE_FIGURES.items()})
    return Own.made


def test_the_http_server_publishes_the_table(http: dict[str, core.Metric]) -> None:
    rows = {row.published: row for row in FIGURES if row.http is not None}
    assert set(http) == set(rows) | HTTP_ALONE
    for name, row in rows.items():
        assert (http[name].type, http[name].documentation) == (KINDS[row], row.http)


def test_triton_publishes_the_table(families: dict[str, Family]) -> None:
    rows = {row.published: row for row in FIGURES if row.triton is not None}
    assert set(families) == set(rows) | TRITON_ALONE
    for name, row in rows.items():
        assert (families[name].kind, families[name].text) == (KINDS[row], row.triton)


def test_every_row_is_published_under_a_name_of_its_own() -> None:
    assert len({row.published for row in FIGURES}) == len(FIGURES)
    assert all(row.http or row.triton or row.vllm for row in FIGURES)
    names = [name for row in FIGURES for name in row.vllm]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("row", [r for r in (*COUNTERS, *GAUGES) if r.http and r.triton], ids=lambda r: r.name)
def test_both_publish_the_same_value(row: Figure, http: dict[str, core.Metric], families: dict[str, Family]) -> None:
    (sample,) = (s for s in http[row.published].samples if s.name == row.published)
    assert sample.value == families[row.published].value > 0


def test_values(http: dict[str, core.Metric]) -> None:
    samples = {s.name: s.value for family in http.values() for s in family.samples if "le" not in s.labels}
    expected = {
        "prompt_tokens_total": 7,  # of the request, not of each sequence
        "prompt_tokens_cached_total": 6,
        "generation_tokens_total": 10,
        "rounds_total": 5,
        "rounds_with_draft_total": 3,
        "rounds_on_device_total": 5,
        "draft_tokens_total": 24,
        "draft_tokens_accepted_total": 3,
        "time_to_first_token_seconds_sum": 1.0,
        "time_per_output_token_seconds_sum": 1.5 / 5 + 1.0 / 3,
        "e2e_request_latency_seconds_sum": 2.0 + 1.5,
        "e2e_request_latency_seconds_count": 2,
        "request_queue_time_seconds_sum": 0.5,
        "request_prefill_time_seconds_sum": 0.5,
        "request_decode_time_seconds_sum": 1.5 + 1.0,
        "inter_token_latency_seconds_sum": 5 * 0.5,
        "inter_token_latency_seconds_count": 5,
        "auto_rounds_total": 5,
        "auto_rounds_with_draft_total": 3,
        "auto_rounds_probing_total": 2,
        "auto_expected_tokens_total": 7.5,
        "auto_committed_tokens_total": 6,
        "auto_expected_seconds_total": 0.024,
        "auto_single_token_seconds_total": 0.015,
        "acceptance_length_sum": 8,
        "acceptance_length_count": 5,
        "requests_running": 1,
        "requests_waiting": 2,
        "slots": 3,
        "cache_usage": 0.25,
    }
    assert {name: samples[f"ddtree_{name}"] for name in expected} == pytest.approx(expected)


def test_reasons_of_budgets_are_summed_and_copied() -> None:
    part = metrics_of([3])
    whole, alone, before = merge([part, metrics_of([2, 1])]), merge([part]), part.automatic.rounds
    part.add_round(1, 0, Decision(0, 1.0, 0.005, 0.005, drafted=False))
    assert (whole.automatic.rounds, whole.automatic.committed_tokens, whole.automatic.probes) == (5, 6, 2)
    assert alone.automatic.rounds == before == part.automatic.rounds - 1
    assert part.automatic.expected_gain == pytest.approx(Decision(8, 2.5, 0.008, 0.005).expected_gain)
    assert AutomaticRounds.total([]).expected_gain is None


def test_vllms_names_have_the_same_figures(http: dict[str, core.Metric], vllm: dict[str, core.Metric]) -> None:
    for row in FIGURES:
        for name in row.vllm:
            alias = vllm[name + ("_total" if KINDS[row] == "counter" else "")]
            assert alias.type == KINDS[row]
            assert all(s.labels["model_name"] == "a model" and s.labels["engine"] == "0" for s in alias.samples)
            if row.http:
                ours = http[row.published]
                own = [(s.name.removeprefix(ours.name), s.labels.get("le"), s.value) for s in ours.samples]
                theirs = [(s.name.removeprefix(name), s.labels.get("le"), s.value) for s in alias.samples]
                assert [x for x in own if x[0] != "_created"] == [x for x in theirs if x[0] != "_created"]
    positions = vllm["vllm:spec_decode_num_accepted_tokens_per_pos_total"].samples
    counts = {int(s.labels["position"]): s.value for s in positions if s.name.endswith("_total")}
    assert {p: n for p, n in counts.items() if n} == {0: 2, 1: 1} and len(counts) == 15
    (ended,) = (s for s in vllm["vllm:request_success_total"].samples if s.name.endswith("_total"))
    assert ended.labels == {"model_name": "a model", "engine": "0", "finished_reason": "stop"} and ended.value == 2
    assert not any(name.startswith("vllm:") for name in http)


@pytest.mark.parametrize("bounds", [SECONDS, SECONDS_PER_TOKEN])
def test_bounds_are_close_enough_for_percentiles(bounds: tuple[float, ...]) -> None:
    assert all(low < high <= 1.7 * low for low, high in pairwise(bounds))
    assert bounds[0] <= 0.001 and bounds[-1] >= 7.5


@pytest.mark.parametrize(
    ("page", "column", "alone"),
    [("serving.md", "http", HTTP_ALONE), ("deployment.md", "triton", TRITON_ALONE)],
)
def test_the_documents_list_what_is_published(page: str, column: str, alone: set[str]) -> None:
    section = (DOCS / page).read_text(encoding="utf-8").split("\n## Metrics\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    listed = [name for cell in rows for name in re.findall(r"`(ddtree_\w+)(?:\{\w+\})?`", cell)]
    assert len(listed) == len(set(listed))
    assert set(listed) == alone | {row.published for row in FIGURES if getattr(row, column) is not None}
