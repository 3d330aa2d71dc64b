"""Clients that leave, stall, say nothing or come in crowds; requests that take too long, engines that fail, and the end
of a server. Nobody's trouble becomes another's."""

import concurrent.futures
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pacing import WAIT_S, wait_for
from serving import LONG, ThreadServer, events_of, hold, long_chat, read_all, release, thread_server

from ddtree_trt.errors import EngineError

ROUND_S = 0.02


@pytest.fixture(scope="module")
def server(tiny_engine: Path) -> Iterator[ThreadServer]:
    with thread_server(tiny_engine, round_s=ROUND_S, max_waiting=2, playground=True) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left_behind(server: ThreadServer) -> Iterator[None]:
    yield
    wait_for(lambda: server.llm.running == 0 and server.llm.waiting == 0)
    wait_for(lambda: server.idle)  # a request that never came whole has no share in those counts
    figures = server.figures()
    assert figures["vllm:num_requests_running"] == figures["vllm:num_requests_waiting"] == 0


STREAMS = {"prompt": ["a", "b"], "n": 2, "stream": True, **LONG}
LEAVING: list[tuple[str, bytes, int]] = [
    ("/v1/chat/completions", long_chat(stream=True), 1),
    ("/v1/chat/completions", long_chat(), 1),
    ("/v1/completions", json.dumps(STREAMS).encode(), 4),
    ("/playground/rounds", long_chat(), 1),
]


@pytest.mark.parametrize(("path", "body", "sequences"), LEAVING, ids=["stream", "whole", "choices", "playground"])
def test_a_dropped_connection_frees_its_slots_within_a_round(
    server: ThreadServer, path: str, body: bytes, sequences: int
) -> None:
    connection = server.raw(body, path)
    wait_for(lambda: server.llm.running == sequences)
    if path == "/playground/rounds" or b'"stream": true' in body:
        assert b"200 OK" in connection.recv(4096)
    server.passes.hold()
    wait_for(lambda: server.passes.held)
    begun, aborted = server.passes.begun, 'vllm:request_success_total{finished_reason="abort"}'
    before = server.figures().get(aborted, 0)
    connection.close()
    wait_for(lambda: server.idle)  # the server has seen it
    server.passes.release()
    wait_for(lambda: server.llm.running == 0)
    assert server.passes.begun < begun + sequences, "no round after the one under way, of a pass for each at most"
    wait_for(lambda: server.figures()[aborted] == before + sequences)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_it_waits_is_gone(server: ThreadServer, stream: bool) -> None:
    held = hold(server, server.llm.slots)
    connection = server.raw(long_chat(stream=stream))
    wait_for(lambda: server.llm.waiting == 1)
    connection.close()
    wait_for(lambda: server.llm.waiting == 0)
    assert server.llm.running == server.llm.slots
    release(held)


def test_a_client_that_leaves_before_its_body_is_whole_leaves_nothing(server: ThreadServer) -> None:
    half = server.raw(b"")
    half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
    wait_for(lambda: not server.idle)
    half.close()


# Wide answers fill the socket's buffers soon: about a megabyte, of which the client reads nothing at first.
WIDE: dict[str, Any] = {"stream": True, "n": 2, "max_tokens": 300, "temperature": 0.5, "seed": 1}
WIDE |= {"logprobs": True, "top_logprobs": 20}


def test_a_slow_reader_stalls_nobody_and_gets_everything(tiny_engine: Path) -> None:
    with thread_server(tiny_engine) as server:
        connection = server.raw(long_chat(**WIDE), receive_buffer=1 << 16)
        wait_for(lambda: server.ended() == 2)  # the engine does not wait for the reader
        assert not server.idle, "its answer is still under way"
        connections: Any = server.server.server_state.connections
        cycles = [c for c in connections if c.cycle and not c.cycle.response_complete]
        assert cycles[0].transport.get_write_buffer_size() < 1 << 20, "what waits is bounded by the flow control"
        assert server.chat(max_tokens=4).status_code == 200
        connection.settimeout(WAIT_S)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(1 << 16)
        connection.close()
        lines = [line for line in data.decode().splitlines() if line.startswith("data: {")]  # between chunks' sizes
        choices = [event["choices"][0] for line in lines for event in events_of(line)]
        whole = server.chat(**{**LONG, **WIDE, "stream": False}).json()
        for expected in whole["choices"]:
            own = [c for c in choices if c["index"] == expected["index"]]
            assert "".join(c["delta"].get("content", "") for c in own) == expected["message"]["content"]
            assert sum(len(c["logprobs"]["content"]) for c in own if c["logprobs"]) == 300


def test_a_reader_that_takes_nothing_is_cut_off(tiny_engine: Path) -> None:
    with thread_server(tiny_engine, stall_timeout_s=1.0) as server:
        connection = server.raw(long_chat(**WIDE), receive_buffer=4096)
        wait_for(lambda: server.ended() == 2)
        wait_for(lambda: server.idle)
        assert b"[DONE]" not in read_all(connection)


def test_a_long_template_holds_up_its_own_request_only(server: ThreadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    monkeypatch.setattr(server.llm.codec, "render", lambda *_: "x" if done.wait(WAIT_S) else "")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        chat = pool.submit(server.chat, "hello", max_tokens=2)
        wait_for(lambda: not server.idle)
        for _ in range(3):
            response = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
            assert response.status_code == 200
            assert server.http.get("/health").status_code == 200
        assert not chat.done()
        done.set()
        assert chat.result().status_code == 200


def test_a_full_queue_answers_429_and_when_to_come_back(server: ThreadServer) -> None:
    held = hold(server, server.llm.slots + 2)
    for stream in (False, True):
        response = server.chat(stream=stream)
        assert response.status_code == 429
        assert 1 <= int(response.headers["retry-after"]) <= 60
        error = response.json()["error"]
        assert error["code"] == "queue_full" and "at most 10 may" in error["message"]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    with client, pytest.raises(openai.RateLimitError):
        client.completions.create(model="tiny", prompt="x")
    # Of several prompts none stays behind when they do not all fit.
    held.pop().close()
    wait_for(lambda: server.llm.waiting == 1)
    assert server.http.post("/v1/completions", json={"prompt": ["a", "b"]}).status_code == 429
    wait_for(lambda: server.llm.waiting == 1)
    release(held)
    wait_for(lambda: server.llm.running == 0)
    assert server.chat(max_tokens=2).status_code == 200


def test_requests_under_way_are_bounded(tiny_engine: Path) -> None:
    with thread_server(tiny_engine, round_s=ROUND_S, max_requests=3) as small:
        held = [small.raw(long_chat(stream=True)) for _ in range(3)]
        wait_for(lambda: small.llm.running == 3)
        response = small.chat()
        assert response.status_code == 429 and "3 requests are under way" in response.json()["error"]["message"]
        assert small.http.get("/health").status_code == 200
        release(held)
        wait_for(lambda: small.llm.running == 0)
        wait_for(lambda: small.chat(max_tokens=2).status_code == 200)


def test_a_failing_pass_is_told_to_its_requests_only(server: ThreadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    verify, fails = server.llm.engine.verify, iter([False, False, True] * 2)

    def failing(requests: Any) -> Any:
        if next(fails, False):
            raise EngineError("scripted failure")
        return verify(requests)

    monkeypatch.setattr(server.llm.engine, "verify", failing)
    response = server.chat(max_tokens=100, ignore_eos=True)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "scripted failure"
    assert response.json()["error"]["type"] == "server_error"
    stream = server.chat(max_tokens=100, ignore_eos=True, stream=True).text
    assert "[DONE]" not in stream and events_of(stream)[-1]["error"]["code"] == "engine_error"
    assert server.chat(max_tokens=2).status_code == 200
    assert server.figures()['vllm:request_success_total{finished_reason="error"}'] == 2


def test_connections_without_a_whole_head_end(server: ThreadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree_trt.serve.server.HEAD_S", 0.2)
    server.passes.hold()
    whole = server.raw(long_chat(max_tokens=4))
    wait_for(lambda: server.llm.running == 1)
    host, port = server.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port)), WAIT_S) for _ in range(4)]
    idle[1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-")
    for head in (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /heal"):  # answered, and then half of another
        idle[2].sendall(head)
    assert b"200 OK" in idle[2].recv(4096)
    dripping = idle.pop()
    dripping.sendall(b"GET /health HTTP/1.1\r\nX: ")
    for connection in idle:
        assert read_all(connection).partition(b"\r\n\r\n")[2] in (b"", b'{"status":"ok"}')

    def cut_off() -> bool:  # however often something comes
        try:
            dripping.sendall(b"x")
        except (ConnectionResetError, BrokenPipeError):
            return True
        return False

    wait_for(cut_off)
    dripping.close()
    server.passes.release()
    assert b"200 OK" in whole.recv(4096), "a request under way has other limits"
    whole.close()


def test_a_request_that_takes_too_long_is_ended(tiny_engine: Path) -> None:
    """Where something must come before the limit, it is asked for until the machine was quick enough once."""
    with thread_server(tiny_engine, round_s=ROUND_S, request_timeout_s=0.4) as hasty:

        def streamed() -> bool:
            """Whether a stream had begun when the limit ended it."""
            events = events_of(hasty.chat(stream=True, **LONG).text)
            assert events[-1]["error"]["code"] == "timeout"
            return "choices" in events[0]

        response = hasty.chat(**LONG)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "timeout" and "0.4 s" in response.json()["error"]["message"]
        wait_for(streamed)
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
