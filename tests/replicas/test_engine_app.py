"""The server's application called without a socket: its answers, its end, its health; and one page of many figures."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pacing import Passes, until
from prometheus_client.parser import text_string_to_metric_families
from serving import LONG

from ddtree_trt.errors import EngineError
from ddtree_trt.replicas.engine_app import Call, EngineApp
from ddtree_trt.replicas.pages import ACCEPT, merge
from ddtree_trt.serve.options import ServeOptions


@pytest.fixture
async def engine(tiny_engine: Path) -> AsyncIterator[EngineApp]:
    app = EngineApp(tiny_engine, ServeOptions())
    await app.start()
    yield app
    await app.stop()


def completion(**fields: object) -> Call:
    return Call("POST", "/v1/completions", json.dumps({"prompt": "def fib(n):", **fields}).encode())


async def test_calls_are_answered_as_by_the_server(engine: EngineApp) -> None:
    status, body = await engine.answer(completion(max_tokens=8))
    assert status == 200 and len(json.loads(body)["choices"][0]["text"]) > 4
    status, body = await engine.answer(completion(colour="red"))
    assert status == 400 and json.loads(body)["error"]["code"] == "unknown_parameter"
    status, body = await engine.answer(Call("GET", "/v1/models/none"))
    assert status == 404 and json.loads(body)["error"]["code"] == "model_not_found"


async def test_a_stream_comes_in_parts_and_ends_when_it_is_closed(engine: EngineApp) -> None:
    passes = Passes(engine.llm.engine)
    answer = engine.respond(completion(stream=True, **LONG))
    first = await anext(answer)
    assert first[0]["type"] == "http.response.start" and first[0]["status"] == 200
    passes.hold()
    await until(lambda: passes.held)
    assert engine.llm.running == 1
    await answer.aclose()  # type: ignore[attr-defined]
    passes.release()
    await until(lambda: engine.llm.running == 0)


async def test_its_own_health_decides(engine: EngineApp, monkeypatch: pytest.MonkeyPatch) -> None:
    await engine.check_health()
    monkeypatch.setattr(engine.llm, "_failure", EngineError("the engine stopped"))
    with pytest.raises(RuntimeError, match=r"/health answered 503: .*the engine stopped"):
        await engine.check_health()


async def test_one_page_of_several(engine: EngineApp) -> None:
    await engine.answer(completion(max_tokens=8))
    await until(lambda: engine.llm.running == 0)
    call = Call("GET", "/metrics", headers=((b"accept", ACCEPT.encode()),))
    page = (await engine.answer(call))[1].decode()
    plain, content_type = merge([("a", page), ("b", page)], "text/plain")
    assert content_type.startswith("text/plain")
    samples = [s for family in text_string_to_metric_families(plain.decode()) for s in family.samples]
    for replica in ("a", "b"):
        own = {s.name: s.value for s in samples if s.labels == {"replica": replica}}
        assert own["ddtree_generation_tokens_total"] == 8 and own["ddtree_slots"] == engine.llm.slots
        ends = {s.labels["finish_reason"]: s.value for s in samples if s.labels.get("replica") == replica
                and s.name == "ddtree_requests_finished_total"}  # fmt: skip
        assert ends == {"length": 1.0}
    assert merge([("a", page)], ACCEPT)[0].decode().rstrip().endswith("# EOF")
