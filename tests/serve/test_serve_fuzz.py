"""Requests nobody should send, many at a time, beside clients whose answers have to stay right."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from pacing import WAIT_S, Stopwatch, wait_for
from request_fuzz import Sent, fuzzed
from serving import ProcessServer, metrics, thread_server

CLIENTS = 6
ALLOWED = {200, 400, 404, 405, 413, 429}
QUESTION = {"prompt": "What is 12 + 30?", "max_tokens": 24, "ignore_eos": True}


# Seconds that each of its checks took, when its input ends.
LOOK = """
import http.client, json, select, sys, time
host, port = sys.argv[1].removeprefix("http://").split(":")
connection, seconds = http.client.HTTPConnection(host, int(port), timeout=120), []
while not select.select([sys.stdin], [], [], 0.02)[0]:
    start = time.perf_counter()
    connection.request("GET", "/health")
    response = connection.getresponse()
    response.read()
    assert response.status == 200
    seconds.append(time.perf_counter() - start)
print(json.dumps(seconds))
"""


@dataclass
class Report:
    """What was seen while the requests ran."""

    statuses: Counter[int | str] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)  # answers that no request may get
    neighbours: list[bool] = field(default_factory=list)  # whether each had the right answer
    health_s: list[float] = field(default_factory=list)


def answer(client: httpx.Client) -> str:
    response = client.post("/v1/completions", json=QUESTION)
    response.raise_for_status()
    return str(response.json()["choices"][0]["text"])


def send(client: httpx.Client, sent: Sent, seed: int, report: Report) -> None:
    if sent.leaves:
        leave(client, sent, seed)
        report.statuses["left"] += 1
        return
    response = client.request(sent.method, sent.path, content=sent.body, headers=sent.headers)
    report.statuses[response.status_code] += 1
    if response.status_code not in ALLOWED or len(response.content) > 1 << 20:
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
    """One client that asks the same question again and again, and one, in a process of its own so that it does not wait
    for the others, that asks for the server's health."""
    done = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            while not done.is_set():
                report.neighbours.append(answer(client) == truth)

    with httpx.Client(base_url=url, timeout=WAIT_S) as client:
        truth = answer(client)
    command = [sys.executable, "-c", LOOK, url]
    looking = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, looking:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            done.set()
            asking.result()
            seen, _ = looking.communicate()
    report.health_s += json.loads(seen)


def attack(url: str, seeds: range) -> Report:
    report = Report()
    with (
        neighbours(url, report),
        httpx.Client(base_url=url, timeout=WAIT_S) as client,
        concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool,
    ):
        for future in [pool.submit(send, client, fuzzed(seed), seed, report) for seed in seeds]:
            future.result()
    return report


def test_fuzzed_requests_leave_the_server_and_its_neighbours_alone(small_engine: Path) -> None:
    with thread_server(small_engine) as server:
        report = attack(server.url, range(500))
        assert report.odd == []
        assert report.statuses[200] > 20 and report.statuses[400] > 100 and report.statuses["left"] > 10
        assert report.neighbours and all(report.neighbours)
        wait_for(lambda: server.llm.running == server.llm.waiting == 0)
        wait_for(server.server._gate.idle.is_set)
        assert server.llm.failure is None


def resident_bytes(client: httpx.Client) -> float:
    return metrics(client)["process_resident_memory_bytes"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_thousand_fuzzed_requests(small_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ProcessServer(small_engine) as server, httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        warm = attack(server.url, range(20_000, 22_000))  # what is allocated once, caches of tokens and kernels
        before = resident_bytes(client)
        with Stopwatch() as watch:
            report = attack(server.url, range(20_000))
        wait_for(lambda: metrics(client)["ddtree_requests_running"] == 0)
        grown = resident_bytes(client) - before
        server.terminate()
        code, errors = server.wait()
    latencies = sorted(itertools.chain(report.health_s, warm.health_s))
    worst, usual = latencies[-1], latencies[len(latencies) // 2]
    with capsys.disabled():
        print(
            f"\n{sum(report.statuses.values())} requests in {watch.seconds:.0f} s: {dict(report.statuses)}; "
            f"{len(report.neighbours)} neighbours; {len(latencies)} health checks, median {1e3 * usual:.1f} ms, "
            f"longest {1e3 * worst:.0f} ms; memory {before / 2**20:.0f} MiB, grown by {grown / 2**20:.1f} MiB"
        )
    assert report.odd == warm.odd == []
    assert all(report.neighbours) and all(warm.neighbours)
    assert (code, errors) == (0, "")
    assert grown < 50 * 2**20
