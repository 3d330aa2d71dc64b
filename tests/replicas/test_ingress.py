"""The ingress's own answers, before engines that a test stands for: when refused clients are to come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

pytest.importorskip("ray", reason="the extra [ray] is not installed")

from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentResponseGenerator

from ddtree_trt.replicas import ingress as ingress_module
from ddtree_trt.replicas.engine_app import Call
from ddtree_trt.replicas.ingress import Ingress
from ddtree_trt.serve.options import ServeOptions


class Answer(DeploymentResponseGenerator):  # type: ignore[type-arg]
    """What an engine's messages come by; or the error of a queue that is full."""

    def __init__(self, clock: Clock, seconds: float | None) -> None:
        self._clock, self._seconds = clock, seconds

    async def __aiter__(self) -> AsyncIterator[list[Message]]:
        if self._seconds is None:
            raise BackPressureError(num_queued_requests=1, max_queued_requests=1)
        yield [{"type": "http.response.start", "status": 200, "headers": []}]
        self._clock.now += self._seconds
        yield [{"type": "http.response.body", "body": b"{}"}]

    def cancel(self) -> None:
        pass


class Clock:
    """A clock that answers move."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Engines:
    """Stands for the handle of the deployment of engines. `seconds`: how long the next answers take; None: the queue is
    full."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seconds: float | None = None

    def options(self, **_: Any) -> Engines:
        return self

    def remote(self, call: Call) -> Answer:
        return Answer(self.clock, self.seconds)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    clock = Clock()
    monkeypatch.setattr(ingress_module, "time", clock)
    yield Engines(clock)


async def answered(ingress: Ingress, method: str = "POST") -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the ingress's answer."""
    messages: list[Message] = []
    sent = [{"type": "http.request", "body": json.dumps({"prompt": "x"}).encode(), "more_body": False}]

    async def receive() -> Message:
        return sent.pop() if sent else await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        messages.append(message)

    path = "/v1/completions" if method == "POST" else "/v1/models"
    await ingress.__serve_build_asgi_app__()(Call(method, path).scope(), receive, send)
    headers = {k.decode(): v.decode() for k, v in messages[0]["headers"]}
    return messages[0]["status"], headers, b"".join(m.get("body", b"") for m in messages[1:])


async def test_when_refused_clients_are_to_come_back(tiny_engine: Path, engines: Engines) -> None:
    """After about the time that requests took; quick answers of another kind say nothing of it."""
    ingress: Any = Ingress(engines, tiny_engine, ServeOptions())  # type: ignore[arg-type]
    for seconds, method in ((11.5, "POST"), (0.001, "GET")):
        engines.seconds = seconds
        assert (await answered(ingress, method))[0] == 200
    engines.seconds = None
    status, headers, body = await answered(ingress)
    assert status == 429 and json.loads(body)["error"]["code"] == "queue_full"
    assert headers["retry-after"] == "12"
