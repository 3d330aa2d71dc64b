"""Measuring real servers: the load that they see, and what the client makes of their answers."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, in_this_process
from serving import ThreadServer, thread_server

from ddtree_trt.bench.load.run import run_load
from ddtree_trt.bench.load.settings import LoadSettings
from ddtree_trt.errors import DDTreeError

SHORT: dict[str, Any] = {"requests": 6, "max_tokens": 12, "limit": 4}


@pytest.fixture(scope="module")
def server(tiny_engine: Path) -> Iterator[ThreadServer]:
    with thread_server(tiny_engine) as running:
        yield running


def test_tokens_are_those_the_server_counted(server: ThreadServer) -> None:
    before = server.figures()
    result = run_load(LoadSettings(url=f"{server.url}/v1", concurrency=(1, 3), rates=(40.0,), **SHORT))
    after = server.figures()
    assert result.model == "tiny" and [run.method for run in result.runs] == ["default", "ar"] * 3
    assert all(len(run.answered) == 6 and not run.errors for run in result.runs)
    tokens = sum(s.tokens for run in result.runs for s in run.sent)
    grown = {
        name: after[f"ddtree_{name}_total"] - before[f"ddtree_{name}_total"] for name in ("generation_tokens", "rounds")
    }
    assert grown["generation_tokens"] == tokens + 2 * 12, "and of one request of each method that is not measured"
    drafted = [run for run in result.runs if run.method == "default"]
    assert sum(s.accepted for run in drafted for s in run.sent) > 0
    assert all(run.acceptance_length is None for run in result.runs if run.method == "ar")
    for run in result.runs:
        for sent in run.sent:
            assert sent.first_s is not None and sent.last_s is not None
            assert sent.due_s <= sent.first_s <= sent.last_s <= run.seconds


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return in_this_process(capsys)


@contextlib.contextmanager
def scripted(
    lines: list[bytes], status: int = 200, hold: int = 0, refuse_every: int = 0
) -> Iterator[tuple[str, list[Any]]]:
    """(URL, bodies received) of a server that answers every request alike, once `hold` requests are there together, and
    refuses each one with a multiple of `refuse_every` as its number."""
    received: list[Any] = []
    together = threading.Barrier(hold) if hold else None
    counting = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, [b'{"data": [{"id": "other"}]}'])

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with counting:
                received.append(body)
                number = len(received)
            if together is not None and number > 1:  # the first one is the warm-up
                together.wait(120)
            if refuse_every and number % refuse_every == 0:
                self._answer(429, [b'{"error": {"message": "come back later"}}'])
            else:
                self._answer(status, lines)

        def _answer(self, status: int, parts: list[bytes]) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.writelines(parts)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", received
        finally:
            server.shutdown()
            thread.join()


ANSWER = [
    b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n',
    b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n',
    b'data: {"choices": [], "usage": {"completion_tokens": 7}, "metrics": {"speculative_decoding": '
    b'{"num_spec_steps": 2, "num_accepted_draft_tokens": 4}}}\n\n',
    b"data: [DONE]\n\n",
]


def test_a_closed_loop_keeps_its_clients_busy() -> None:
    """The server answers only when five requests are there together: fewer would wait for ever."""
    with scripted(ANSWER, hold=5) as (url, received):
        settings = LoadSettings(url=url, concurrency=(5,), methods=("default",), requests=20, max_tokens=7, seed=4)
        (run,) = run_load(settings).runs
    assert [s.tokens for s in run.sent] == [7] * 20 and run.acceptance_length == 3
    assert all(body["stream_options"] == {"include_usage": True} and body["max_tokens"] == 7 for body in received)
    assert sorted(body["seed"] for body in received[1:]) == list(range(4, 24))
    assert {body["model"] for body in received} == {"other"} and not any("method" in body for body in received)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    with scripted(ANSWER, hold=12) as (url, _):
        (run,) = run_load(LoadSettings(url=url, rates=(200.0,), methods=("default",), requests=12, max_tokens=7)).runs
    assert len(run.answered) == 12


@pytest.mark.parametrize(
    ("lines", "status", "message"),
    [
        (
            [b'{"error": {"message": "no such method"}}'],
            400,
            "refused a request with method ar: HTTP 400: no such method",
        ),
        ([b"data: {"], 200, "JSONDecodeError"),
        ([b'data: {"error": {"message": "it broke"}}\n\n'], 200, "it broke"),
        ([b"data: [DONE]\n\n"], 200, "ended without usage"),
    ],
)
def test_a_server_that_cannot_be_measured(lines: list[bytes], status: int, message: str) -> None:
    with scripted(lines, status) as (url, _), pytest.raises(DDTreeError) as caught:
        run_load(LoadSettings(url=url, concurrency=(1,), methods=("ar",)))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_no_server() -> None:
    with scripted([]) as (url, _):
        pass
    with pytest.raises(DDTreeError, match=r"no model is served at .*; is it up\?"):
        run_load(LoadSettings(url=url, concurrency=(1,)))


def test_refused_requests_are_counted() -> None:
    with scripted(ANSWER, refuse_every=2) as (url, _):
        settings = LoadSettings(url=url, concurrency=(3,), methods=("default",), requests=6, max_tokens=7)
        (run,) = run_load(settings).runs
    assert len(run.answered) == 3 and run.errors == {"HTTP 429: come back later": 3}
    assert run.tokens_per_s == 3 * 7 / run.seconds


def test_the_command_starts_a_server_of_its_own(cli: Cli, tiny_engine: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--concurrency", "1,2", "--requests", "3", "--max-tokens", "6", "--limit", "2"]
    outputs = ["--json", str(out / "r.json"), "--markdown", str(out / "r.md"), "--plot", str(out)]
    code, shown, errors = cli("bench", str(tiny_engine), *arguments, *outputs)
    assert code == 0, errors
    assert "1 concurrent" in shown and sorted(p.name for p in out.iterdir()) == [
        "load-closed.png",
        "r.json",
        "r.md",
    ]
    runs = json.loads((out / "r.json").read_text())["runs"]
    assert [(r["level"]["concurrency"], r["method"], r["answered"]) for r in runs] == [
        (clients, method, 3) for clients in (1, 2) for method in ("default", "ar")
    ]


def test_wrong_calls_of_the_command(cli: Cli, tiny_engine: Path) -> None:
    for arguments, message in (
        ((str(tiny_engine), "--rate", "1", "--url", "http://127.0.0.1:1"), "give no ENGINE_DIR"),
        (("--rate", "x"), "--rate must be numbers separated by commas"),
        (("--url", "http://127.0.0.1:1"), "give numbers of concurrent requests with --concurrency, or rates with"),
        (("--rate", "1", "--url", "http://127.0.0.1:99999"), "not 'http://127.0.0.1:99999': Port out of range"),
        (("--rate", "1", "--url", "http://127.0.0.1:x"), "--url must be a URL such as http://localhost:8000"),
        (("--rate", "1", "--url", "http://é" + "x" * 70), ": Invalid IDNA hostname"),
        ((str(tiny_engine), "--concurrency=0"), "--concurrency must be from 1 to 4096, not 0"),
        (("no-engine", "--rate", "1", "--prompts", "nothing"), "nothing"),
    ):
        code, _, errors = cli("bench", *arguments)
        assert code == 2 and message in errors and errors.count("\n") == 1, errors
