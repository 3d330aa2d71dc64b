"""Constraints of strangers, many at a time, beside a client whose answers and their pace have to stay right."""

from __future__ import annotations

import concurrent.futures
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from constraint_fuzz import body
from pacing import WAIT_S, Stopwatch, wait_for
from serving import LONG, ProcessServer, metrics

CLIENTS = 6
MANY = 5000
ALLOWED = {200, 400, 429}


@dataclass
class Report:
    """What was seen while the requests ran."""

    statuses: Counter[int | str] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)  # answers that no request may get
    health_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # between two parts of a stream that runs beside
    texts: set[str] = field(default_factory=set)  # of that stream


def send(client: httpx.Client, seed: int, report: Report) -> None:
    response = client.post("/v1/completions", json=body(seed))
    status: int | str = response.status_code
    if '"error"' in response.text and status == 200:
        status = "ended"  # a stream whose constraint came to a limit while it ran
    report.statuses[status] += 1
    if response.status_code not in ALLOWED or "Traceback" in response.text or "panic" in response.text:
        report.odd.append(f"seed {seed}: {response.status_code} {response.text[:300]}")


@contextmanager
def beside(url: str, report: Report) -> Iterator[None]:
    """A client that streams a long text again and again, and one that asks for the server's health."""
    done = threading.Event()

    def stream() -> None:
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            while not done.is_set():
                texts: list[str] = []
                asked = {"prompt": "def fib(n):", "stream": True, **LONG, "max_tokens": 150}
                with client.stream("POST", "/v1/completions", json=asked) as response:
                    lines, line = response.iter_lines(), ""
                    while line != "data: [DONE]":
                        with Stopwatch() as waited:
                            line = next(lines)
                        if line.startswith("data: {"):
                            report.gaps_s += [waited.seconds] if texts else []
                            texts.append(json.loads(line[6:])["choices"][0]["text"])
                report.texts.add("".join(texts))

    def look() -> None:
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            while not done.is_set():
                time.sleep(0.05)
                with Stopwatch() as waited:
                    assert client.get("/health").status_code == 200
                report.health_s.append(waited.seconds)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = [pool.submit(stream), pool.submit(look)]
        try:
            yield
        finally:
            done.set()
            for each in running:
                each.result()


def attack(url: str, seeds: range) -> Report:
    report = Report()
    with (
        beside(url, report),
        httpx.Client(base_url=url, timeout=WAIT_S) as client,
        concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool,
    ):
        for future in [pool.submit(send, client, seed, report) for seed in seeds]:
            future.result()
    return report


def test_fuzzed_constraints_leave_the_server_and_its_neighbour_alone(small_engine: Path) -> None:
    with ProcessServer(small_engine) as server, httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        report = attack(server.url, range(200))
        wait_for(lambda: metrics(client)["ddtree_requests_running"] == 0)
        server.terminate()
        assert server.wait() == (0, "")
    assert report.odd == []
    assert report.statuses[200] > 40 and report.statuses[400] > 40
    assert report.health_s and report.gaps_s and len(report.texts) == 1


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_five_thousand_fuzzed_constraints(small_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the times, which are the machine's; what is asserted is what no machine changes."""
    with ProcessServer(small_engine) as server, httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        warm = attack(server.url, range(MANY, MANY + 1000))  # what is allocated once, the arenas of the allocator too
        before = metrics(client)["process_resident_memory_bytes"]
        with Stopwatch() as watch:
            report = attack(server.url, range(MANY))
        wait_for(lambda: metrics(client)["ddtree_requests_running"] == 0)
        grown = metrics(client)["process_resident_memory_bytes"] - before
        server.terminate()
        code, errors = server.wait()
    with capsys.disabled():
        print(
            f"\n{sum(report.statuses.values())} requests in {watch.seconds:.0f} s: {dict(report.statuses)}; health "
            f"median {1e3 * statistics.median(report.health_s):.0f} ms, longest {1e3 * max(report.health_s):.0f} ms; "
            f"gaps of a stream median {1e3 * statistics.median(report.gaps_s):.0f} ms, longest "
            f"{1e3 * max(report.gaps_s):.0f} ms; memory {before / 2**20:.0f} MiB, grown by {grown / 2**20:.1f} MiB"
        )
    assert report.odd == warm.odd == []
    assert len(report.texts | warm.texts) == 1
    assert (code, errors) == (0, "")
    assert grown < 100 * 2**20
