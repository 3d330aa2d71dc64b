"""Settings, arrivals and figures of a measurement under load, against plain statements of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_results import make_environment

from ddtree_trt.bench.load import tables
from ddtree_trt.bench.load.arrivals import poisson_arrivals
from ddtree_trt.bench.load.client import Sent
from ddtree_trt.bench.load.picture import draw, plot_load
from ddtree_trt.bench.load.result import LoadResult, Percentiles, Run, to_json
from ddtree_trt.bench.load.settings import Level, LoadSettings
from ddtree_trt.errors import UsageError


def run(level: Level, method: str, seconds: float, firsts_ms: list[int]) -> Run:
    """Requests of 5 tokens each, sent 0.1 s apart, with a token every 10 ms after the first; and one that failed."""
    sent = [
        Sent(due_s=i / 10, first_s=i / 10 + ms / 1000, last_s=i / 10 + ms / 1000 + 0.04, tokens=5, rounds=1, accepted=3)
        for i, ms in enumerate(firsts_ms)
    ]
    return Run(level, method, seconds, (*sent, Sent(due_s=9.0, error="HTTP 429: the queue is full")))


def result() -> LoadResult:
    settings = LoadSettings(url="http://h:1", concurrency=(1, 4), rates=(2.5,))
    runs = []
    for place, level in enumerate(settings.levels):
        runs.append(run(level, "default", 1.0 + place, [10, 20, 30, 40]))
        runs.append(run(level, "ar", 2.0, [20, 40, 60, 80]))
    return LoadResult(settings, "http://h:1", "m", make_environment(), tuple(runs))


def test_arrivals_are_poisson() -> None:
    rate, count = 5.0, 20_000
    arrivals = poisson_arrivals(rate, count, 3)
    gaps = np.diff(arrivals, prepend=0.0)
    assert (gaps > 0).all() and gaps.mean() == pytest.approx(1 / rate, rel=0.03)
    assert gaps.std() == pytest.approx(1 / rate, rel=0.05), "an exponential's deviation is its mean"
    for share in (0.1, 0.5, 0.9):  # quantiles of the exponential
        assert np.quantile(gaps, share) == pytest.approx(-math.log(1 - share) / rate, rel=0.06)
    assert np.corrcoef(gaps[1:], gaps[:-1])[0, 1] == pytest.approx(0, abs=0.03)
    assert np.array_equal(arrivals, poisson_arrivals(rate, count, 3))
    assert np.allclose(poisson_arrivals(2 * rate, count, 3), arrivals / 2)
    assert not np.array_equal(arrivals, poisson_arrivals(rate, count, 4))


def test_figures_of_a_run() -> None:
    measured = result().at(Level(concurrency=1), "default")
    assert len(measured.answered) == 4 and measured.errors == {"HTTP 429: the queue is full": 1}
    assert measured.tokens_per_s == 20 and measured.requests_per_s == 4
    assert measured.acceptance_length == 4
    first, each, whole = measured.first_token_s, measured.per_token_s, measured.whole_s
    assert first is not None and each is not None and whole is not None
    assert (first.p50, first.p90, first.p99) == pytest.approx((0.025, 0.037, 0.0397))
    assert (each.p50, each.p99) == pytest.approx((0.01, 0.01))
    assert whole.p50 == pytest.approx(0.025 + 0.04)
    assert Percentiles.of([None, None]) is None
    assert Sent(0.0, first_s=1.0, last_s=1.0, tokens=1).per_token_s is None


def test_table_and_json() -> None:
    measured = result()
    header, rows = tables.overview(measured)
    assert [r[0] for r in rows[::2]] == ["1 concurrent", "4 concurrent", "2.5 requests/s"]
    line = dict(zip(header, rows[0], strict=True))
    assert line["over ar"] == "2.00×" and line["first token ms"] == "25 / 37 / 40" and line["answered"] == "4/5"
    text = tables.markdown(measured)
    assert text.startswith("| load | method |") and "1 × HTTP 429: the queue is full" in text
    data = json.loads(to_json(measured))
    assert data["kind"] == "load" and len(data["runs"]) == 6
    assert data["runs"][0]["time_to_first_token_s"]["p50"] == pytest.approx(0.025)
    assert len(data["runs"][0]["requests"]) == 5 and data["settings"]["concurrency"] == [1, 4]


def test_pictures_show_every_run(tmp_path: Path) -> None:
    measured = result()
    assert [p.name for p in plot_load(measured, tmp_path)] == ["load-closed.png", "load-open.png"]
    closed = [r for r in measured.runs if r.level.rate is None]
    throughput, first, each, whole = draw(measured, closed, "x").axes
    assert [list(map(float, line.get_ydata())) for line in throughput.lines] == [[20, 10], [10, 10]]
    assert [list(map(float, line.get_xdata())) for line in throughput.lines] == [[1, 4], [1, 4]]
    assert [line.get_label() for line in first.lines[:3]] == ["default p50", "default p90", "default p99"]
    assert list(map(float, first.lines[0].get_ydata())) == pytest.approx([25, 25])
    assert len(each.lines) == len(whole.lines) == 6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give numbers of concurrent requests with --concurrency, or rates with --rate"),
        ({"concurrency": (0,)}, "--concurrency must be from 1 to 4096, not 0"),
        ({"rates": (0.0,)}, "--rate must be from 0.001"),
        ({"rates": (math.nan,)}, "--rate must be from 0.001"),
        ({"concurrency": (1, 2, 1)}, "--concurrency has 1 twice"),
        ({"concurrency": (1,), "methods": ()}, "--methods must name at least one"),
        ({"concurrency": (1,), "requests": 0}, "--requests must be from 1"),
        ({"concurrency": (1, 8), "requests": 7}, "--requests 7 are fewer than 8 clients; give at least as many"),
        ({"concurrency": (1,), "url": "localhost:8000"}, "--url must be a URL such as http://localhost:8000"),
        ({"concurrency": (1,), "url": "http://:8000"}, "--url must be a URL such as http://localhost:8000, not"),
        ({"concurrency": (1,), "url": "http://h:99999"}, "not 'http://h:99999': Port out of range 0-65535"),
        ({"concurrency": (1,), "url": "http://h:port"}, "not 'http://h:port': Port could not be cast"),
        ({"concurrency": (1,), "url": "http://h:0"}, "not 'http://h:0': no server has port 0"),
        ({"concurrency": (1,), "url": "http://[::1"}, "not 'http://[::1': Invalid IPv6 URL"),
        ({"concurrency": (1,), "url": "http://h/v1?x=1"}, "what follows ? or # cannot be in it"),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        LoadSettings(**given)
    assert message in str(caught.value)


def test_how_many_requests() -> None:
    settings = LoadSettings(concurrency=(1, 64), rates=(3.0,))
    assert [settings.requests_at(level) for level in settings.levels] == [24, 256, 24]
    assert LoadSettings(concurrency=(64,), requests=70).requests_at(Level(concurrency=64)) == 70
