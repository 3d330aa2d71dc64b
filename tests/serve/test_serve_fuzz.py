"""Requests nobody should send, and constraints of strangers, many at a time, beside clients whose answers have to stay
right."""

import concurrent.futures
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from constraint_fuzz import body
from pacing import WAIT_S, wait_for
from request_fuzz import Sent, fuzzed
from serving import LONG, ProcessServer, events_of, metrics

CLIENTS = 6
ALLOWED = {200, 400, 404, 405, 413, 429}
QUESTION = {"prompt": "What is 12 + 30?", "max_tokens": 24, "ignore_eos": True}


@dataclass
class Report:
    """What was seen while the requests ran."""

    statuses: Counter[int | str] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)  # answers that no request may get
    whole: set[str] = field(default_factory=set)  # what a neighbour's question was answered with
    streamed: set[str] = field(default_factory=set)  # the same of one who streams
    healthy: int = 0


Send = Callable[[httpx.Client, int, Report], None]


def send_request(client: httpx.Client, seed: int, report: Report) -> None:
    sent = fuzzed(seed)
    if sent.leaves:
        leave(client, sent, seed)
        report.statuses["left"] += 1
    else:
        _judge(client.request(sent.method, sent.path, content=sent.body, headers=sent.headers), seed, report)


def send_constraint(client: httpx.Client, seed: int, report: Report) -> None:
    _judge(client.post("/v1/completions", json=body(seed)), seed, report)


def _judge(response: httpx.Response, seed: int, report: Report) -> None:
    # A stream whose constraint came to a limit while it ran has an error in it.
    ended = response.status_code == 200 and '"error"' in response.text
    report.statuses["ended" if ended else response.status_code] += 1
    hidden = any(word in response.text for word in ("Traceback", "panic"))
    if response.status_code not in ALLOWED or len(response.content) > 1 << 20 or hidden:
        report.odd.append(f"seed {seed}: {response.status_code} {response.text[:300]}")


def leave(client: httpx.Client, sent: Sent, seed: int) -> None:
    """Send all or a part of a request, and hang up."""
    url = client.base_url
    with socket.create_connection((url.host, url.port or 80)) as connection, suppress(OSError):
        head = f"POST {sent.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        data = f"{head}Content-Length: {len(sent.body)}\r\n\r\n".encode() + sent.body
        connection.sendall(data[: len(data) if seed % 3 else seed % len(data)])
        time.sleep(seed % 7 / 100)


@contextmanager
def neighbours(url: str, report: Report) -> Iterator[None]:
    """Clients that ask the same question again and again, that stream a long text, and that ask for the health."""
    done = threading.Event()

    def ask(client: httpx.Client) -> None:
        response = client.post("/v1/completions", json=QUESTION)
        report.whole.add(response.raise_for_status().json()["choices"][0]["text"])

    def stream(client: httpx.Client) -> None:
        asked = {"prompt": "def fib(n):", "stream": True, **LONG, "max_tokens": 150}
        text = client.post("/v1/completions", json=asked).text
        assert text.endswith("data: [DONE]\n\n")
        report.streamed.add("".join(event["choices"][0]["text"] for event in events_of(text)))

    def look(client: httpx.Client) -> None:
        assert client.get("/health").status_code == 200
        report.healthy += 1

    def again(work: Callable[[httpx.Client], None]) -> None:
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            while not done.wait(0.1):
                work(client)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        running = [pool.submit(again, work) for work in (ask, stream, look)]
        try:
            yield
        finally:
            done.set()
            for each in running:
                each.result()


def attack(url: str, send: Send, seeds: range, report: Report) -> None:
    with (
        neighbours(url, report),
        httpx.Client(base_url=url, timeout=WAIT_S) as client,
        concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool,
    ):
        list(pool.map(lambda seed: send(client, seed, report), seeds))


@pytest.fixture(scope="module")
def server(small_engine: Path) -> Iterator[ProcessServer]:
    with ProcessServer(small_engine) as server:
        yield server
        server.terminate()
        assert server.wait() == (0, "")


@pytest.mark.parametrize(
    ("send", "count", "warm", "fewest", "growth"),
    [
        (send_request, 150, 0, {200: 5, 400: 30, "left": 3}, None),
        (send_constraint, 60, 0, {200: 10, 400: 10}, None),
        # Warm: what is allocated once, caches, kernels and the allocator's arenas, is allocated before.
        pytest.param(send_request, 20_000, 2000, {}, 50 << 20, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
        pytest.param(send_constraint, 5000, 1000, {}, 100 << 20, marks=[pytest.mark.slow, pytest.mark.timeout(7200)]),
    ],
)
def test_fuzzed_requests_leave_the_server_and_its_neighbours_alone(
    server: ProcessServer, send: Send, count: int, warm: int, fewest: dict[int | str, int], growth: int | None
) -> None:
    report = Report()
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        attack(server.url, send, range(count, count + warm), report)
        before = metrics(client)["process_resident_memory_bytes"]
        attack(server.url, send, range(count), report)
        wait_for(lambda: metrics(client)["vllm:num_requests_running"] == 0)
        grown = metrics(client)["process_resident_memory_bytes"] - before
    assert report.odd == []
    assert all(report.statuses[status] > least for status, least in fewest.items()), report.statuses
    assert len(report.whole) == len(report.streamed) == 1 and report.healthy, "neighbours get one answer"
    assert growth is None or grown < growth
