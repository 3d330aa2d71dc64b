"""Requests that take too long, an engine that died, the figures, and the end of a server."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import threading
from pathlib import Path

import httpx
import openai
import pytest
from pacing import WAIT_S, wait_for
from serving import LONG, thread_server

ROUND_S = 0.02


def test_a_request_that_takes_too_long_is_ended(tiny_engine: Path) -> None:
    """Where something must come before the limit, it is asked for until the machine was quick enough once."""
    with thread_server(tiny_engine, round_s=ROUND_S, request_timeout_s=0.4) as hasty:

        def streamed() -> str:
            """The first event of a stream that the limit ended."""
            body = {"prompt": "x", "stream": True, **LONG}
            with hasty.http.stream("POST", "/v1/completions", json=body) as stream:
                lines = [line for line in stream.iter_lines() if line]
            assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "timeout"
            return lines[0].removeprefix("data: ")

        response = hasty.chat(**LONG)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "timeout" and "0.4 s" in response.json()["error"]["message"]
        wait_for(lambda: "choices" in json.loads(streamed()))
        client = openai.OpenAI(base_url=f"{hasty.url}/v1", api_key="x", max_retries=0)
        with client, pytest.raises(openai.APIError, match="took longer"):
            list(client.completions.create(model="tiny", prompt="x", stream=True, extra_body=LONG))
        unsent = socket.create_connection(hasty.raw(b"").getpeername())
        unsent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        unsent.settimeout(WAIT_S)
        assert b"504" in unsent.recv(4096), "a body that does not come is timed, too"
        unsent.close()
        wait_for(lambda: hasty.llm.running == 0)
        wait_for(lambda: hasty.chat(max_tokens=2).status_code == 200)


def test_a_dead_engine_shows_in_the_health(tiny_engine: Path) -> None:
    with thread_server(tiny_engine) as dying:
        assert dying.http.get("/health").json() == {"status": "ok"}

        def broken() -> None:
            raise RuntimeError("scripted bug")

        dying.llm.core.scheduler.step = broken  # type: ignore[method-assign, assignment]
        assert dying.chat().status_code == 500
        health = dying.http.get("/health")
        assert health.status_code == 503 and "scripted bug" in health.json()["error"]["message"]
        assert dying.chat().status_code == 500


def test_metrics_add_up(tiny_engine: Path) -> None:
    with thread_server(tiny_engine) as fresh:
        answers = [fresh.chat(f"What is {i} + 2?", max_tokens=20, tree_budget=8).json() for i in range(5)]
        fresh.chat("What is 3 + 2?", max_tokens=20, stream=True, n=2, temperature=1, tree_budget=8)
        assert fresh.chat(temperature=-1).status_code == 400
        m = fresh.figures()
        assert sum(v for k, v in m.items() if k.startswith("ddtree_requests_finished_total")) == 7
        assert m['ddtree_requests_refused_total{status="400"}'] == 1
        assert m["ddtree_prompt_tokens_total"] >= sum(a["usage"]["prompt_tokens"] for a in answers)
        tokens = m["ddtree_generation_tokens_total"]
        assert sum(a["usage"]["completion_tokens"] for a in answers) < tokens <= 140
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "time_per_output_token_seconds"):
            assert m[f"ddtree_{name}_count"] == 7 and m[f"ddtree_{name}_sum"] > 0
        # A round commits its accepted drafts and one token more; the first token comes from the prompt's pass.
        assert m["ddtree_acceptance_length_count"] == m["ddtree_rounds_total"]
        assert m["ddtree_acceptance_length_sum"] == m["ddtree_rounds_total"] + m["ddtree_draft_tokens_accepted_total"]
        assert m["ddtree_acceptance_length_sum"] == tokens - 7
        assert m["ddtree_draft_tokens_total"] == 8 * m["ddtree_rounds_total"]
        assert m["ddtree_slots"] == fresh.llm.slots and m["process_resident_memory_bytes"] > 0
        openmetrics = fresh.http.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        assert openmetrics.text.endswith("# EOF\n") and "openmetrics" in openmetrics.headers["content-type"]


def test_draining_finishes_what_runs_and_refuses_what_comes(tiny_engine: Path) -> None:
    with thread_server(tiny_engine, drain_timeout_s=WAIT_S) as server, httpx.Client(timeout=WAIT_S) as other:
        expected = server.chat(max_tokens=24, ignore_eos=True).json()["choices"]
        server.passes.hold()
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            under_way = [pool.submit(server.chat, max_tokens=24, ignore_eos=True) for _ in range(12)]
            wait_for(lambda: server.llm.running + server.llm.waiting == 12)
            other.get(f"{server.url}/health")  # a connection that is already open
            server.server.drain()
            wait_for(lambda: server.server._gate.draining)
            late = other.post(f"{server.url}/v1/completions", json={"prompt": "x"})
            assert late.status_code == 503 and late.headers["connection"] == "close" and late.headers["retry-after"]
            assert late.json()["error"]["code"] == "shutting_down"
            assert other.get(f"{server.url}/health").status_code == 503
            server.passes.release()
            answers = [f.result() for f in under_way]
        assert [a.json()["choices"] for a in answers] == [expected] * 12
        wait_for(lambda: not any(t.name == "ddtree-engine" for t in threading.enumerate() if t is server.llm._worker))


def test_what_does_not_finish_in_the_drain_timeout_is_told(tiny_engine: Path) -> None:
    with thread_server(tiny_engine, round_s=ROUND_S, drain_timeout_s=0.3) as server:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            whole = pool.submit(server.chat, **LONG)
            stream = pool.submit(server.chat, stream=True, **LONG)
            wait_for(lambda: server.llm.running == 2)
            server.server.drain()
            assert whole.result().status_code == 503
            lines = [line for line in stream.result().text.splitlines() if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
