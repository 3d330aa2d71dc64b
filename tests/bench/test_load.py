"""Measuring servers under load: what they see, what the client makes of their answers, and its figures."""

import json
import math
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pacing import WAIT_S
from scripted_server import Answer, events, scripted_server
from serving import ThreadServer, thread_server

from ddtree_trt.errors import DDTreeError, UsageError
from workbench.__main__ import main as workbench_main
from workbench.load import Level, LoadSettings, Run, Sent, figures, poisson_arrivals, run_load

SHORT: dict[str, Any] = {"requests": 6, "max_tokens": 12, "limit": 4}


@pytest.fixture(scope="module")
def server(tiny_engine: Path) -> Iterator[ThreadServer]:
    with thread_server(tiny_engine) as running:
        yield running


def test_tokens_are_those_the_server_counted(server: ThreadServer) -> None:
    before = server.figures()
    result = run_load(LoadSettings(concurrency=(1, 3), rates=(40.0,), **SHORT), f"{server.url}/v1")
    after = server.figures()
    assert result.model == "tiny" and [run.method for run in result.runs] == ["default", "ar"] * 3
    assert all(len(run.answered) == 6 and not run.errors for run in result.runs)
    tokens = sum(s.tokens for run in result.runs for s in run.sent)
    grown = {name: after[name] - before[name] for name in ("vllm:generation_tokens_total", "ddtree_rounds_total")}
    assert grown["vllm:generation_tokens_total"] == tokens + 2 * 12, (
        "and of one request of each method that is not measured"
    )
    drafted = [run for run in result.runs if run.method == "default"]
    assert sum(s.accepted for run in drafted for s in run.sent) > 0
    assert all(run.acceptance_length is None for run in result.runs if run.method == "ar")
    for run in result.runs:
        for sent in run.sent:
            assert sent.first_s is not None and sent.last_s is not None
            assert sent.due_s <= sent.first_s <= sent.last_s <= run.seconds


def answering(*parts: Any, hold: int = 0, refuse_every: int = 0) -> Answer:
    """Every request is answered alike, once `hold` are there together; each one with a multiple of `refuse_every` as
    its number is refused."""
    together = threading.Barrier(hold) if hold else None

    def answer(number: int) -> tuple[int, bytes]:
        if together is not None and number > 1:  # the first one is the warm-up
            together.wait(WAIT_S)
        if refuse_every and number % refuse_every == 0:
            return 429, b'{"error": {"message": "come back later"}}'
        return 200, events(*parts)

    return answer


ANSWER: list[Any] = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "a"}}]},
    {
        "choices": [],
        "usage": {"completion_tokens": 7},
        "metrics": {"speculative_decoding": {"num_spec_steps": 2, "num_accepted_draft_tokens": 4}},
    },
]
ONE = LoadSettings(methods=("default",), max_tokens=7)


def test_a_closed_loop_keeps_its_clients_busy() -> None:
    """The server answers only when five requests are there together: fewer would wait for ever."""
    with scripted_server(answering(*ANSWER, hold=5)) as (url, received):
        (run,) = run_load(replace(ONE, concurrency=(5,), requests=20, seed=4), url).runs
    assert [s.tokens for s in run.sent] == [7] * 20 and run.acceptance_length == 3
    assert all(body["stream_options"] == {"include_usage": True} and body["max_tokens"] == 7 for body in received)
    assert sorted(body["seed"] for body in received[1:]) == list(range(4, 24))
    assert {body["model"] for body in received} == {"other"} and not any("method" in body for body in received)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    with scripted_server(answering(*ANSWER, hold=12)) as (url, _):
        (run,) = run_load(replace(ONE, rates=(200.0,), requests=12), url).runs
    assert len(run.answered) == 12
    with scripted_server(answering(*ANSWER, refuse_every=2)) as (url, _):
        (run,) = run_load(replace(ONE, concurrency=(3,), requests=6), url).runs
    assert len(run.answered) == 3 and run.errors == {"HTTP 429: come back later": 3}


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((400, b'{"error": {"message": "no such one"}}'), "refused a request with method ar: HTTP 400: no such one"),
        ((200, events({"error": {"message": "it broke"}})), "it broke"),
    ],
)
def test_a_server_that_cannot_be_measured(reply: tuple[int, bytes], message: str) -> None:
    with scripted_server(lambda _: reply) as (url, _), pytest.raises(DDTreeError, match=message):
        run_load(LoadSettings(concurrency=(1,), methods=("ar",)), url)


def test_the_command_starts_a_server_of_its_own(
    tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"workbench load --engine {tiny_engine} --concurrency 1,2 --requests 3 --max-tokens 6 --limit 2"
    monkeypatch.setattr(sys, "argv", [*words.split(), "--json", str(tmp_path / "r.json")])
    with pytest.raises(SystemExit) as ended:
        workbench_main()
    assert ended.value.code == 0 and "| 1 concurrent " in capsys.readouterr().out
    runs = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert [(r["level"]["concurrency"], r["method"], r["answered"]) for r in runs] == [
        (clients, method, 3) for clients in (1, 2) for method in ("default", "ar")
    ]
    for given in ({}, {"concurrency": (0,)}, {"rates": (1.0, 0.0)}):
        with pytest.raises(UsageError, match="give numbers of concurrent requests with --concurrency, or rates"):
            run_load(LoadSettings(**given), "http://127.0.0.1:9")


def test_arrivals_are_poisson() -> None:
    arrivals = poisson_arrivals(5.0, 20_000, 3)
    gaps = np.diff(arrivals, prepend=0.0)
    for share in (0.1, 0.5, 0.9):  # quantiles of the exponential
        assert np.quantile(gaps, share) == pytest.approx(-math.log(1 - share) / 5.0, rel=0.06)
    assert np.corrcoef(gaps[1:], gaps[:-1])[0, 1] == pytest.approx(0, abs=0.03)
    assert np.array_equal(arrivals, poisson_arrivals(5.0, 20_000, 3))
    assert np.allclose(poisson_arrivals(10.0, 20_000, 3), arrivals / 2)


def test_figures_of_a_run() -> None:
    """Of requests of 5 tokens each, sent 0.1 s apart, with a token every 10 ms after the first; and one that failed."""
    starts = [(i / 10, i / 10 + ms / 1000) for i, ms in enumerate((10, 20, 30, 40))]
    sent = [Sent(due, first_s=at, last_s=at + 0.04, tokens=5, rounds=1, accepted=3) for due, at in starts]
    measured = Run(Level(1), "default", 1.0, (*sent, Sent(due_s=9.0, error="HTTP 429: the queue is full")))
    assert len(measured.answered) == 4 and measured.errors == {"HTTP 429: the queue is full": 1}
    assert measured.tokens_per_s == 20 and measured.acceptance_length == 4
    assert measured.latency("first_token_s") == pytest.approx((0.025, 0.037, 0.0397))
    assert measured.latency("per_token_s") == pytest.approx((0.01,) * 3)
    assert measured.latency("whole_s") == pytest.approx((0.065, 0.077, 0.0797))
    assert figures(measured)["requests_per_s"] == 4 and figures(measured)["first_token_s"][0] == pytest.approx(0.025)
    assert Run(Level(1), "ar", 1.0, (Sent(0.0, first_s=1.0, last_s=1.0, tokens=1),)).latency("per_token_s") is None
