"""Connections by which nothing comes, or nothing more: they keep nobody out, and who has asked is answered."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pacing import WAIT_S, wait_for
from serving import ProcessServer, ThreadServer, hold, long_chat, read_all, release, thread_server

from ddtree_trt.serve import connections


@pytest.fixture(scope="module")
def server(tiny_engine: Path) -> Iterator[ThreadServer]:
    with thread_server(tiny_engine, round_s=0.02, max_waiting=2) as server:
        yield server


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_sends_no_more_gets_its_answer(server: ThreadServer, stream: bool) -> None:
    held = hold(server, server.llm.slots)  # so that it waits for a slot at first
    connection = server.raw(long_chat(stream=stream, max_tokens=20))
    wait_for(lambda: server.llm.waiting == 1)
    connection.settimeout(WAIT_S)
    head = connection.recv(4096) if stream else b""
    connection.shutdown(socket.SHUT_WR)
    noticed = connection.recv(4096)
    assert noticed == (b"3\r\n:\n\n\r\n" if stream else b"HTTP/1.1 100 \r\n\r\n")
    release(server, held)
    answer = head + noticed + read_all(connection)
    assert answer.count(b"HTTP/1.1 200 OK") == 1
    if stream:
        assert b"[DONE]" in answer
    else:
        assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 20


def test_a_client_that_sends_no_more_and_then_leaves_is_gone(server: ThreadServer) -> None:
    for stream in (True, False):
        held = hold(server, server.llm.slots)
        connection = server.raw(long_chat(stream=stream))
        wait_for(lambda: server.llm.waiting == 1)
        connection.shutdown(socket.SHUT_WR)
        assert server.http.get("/health").status_code == 200
        connection.close()
        wait_for(lambda: server.llm.waiting == 0)
        release(server, held)
        wait_for(lambda: server.llm.running == 0)


def test_connections_without_a_whole_head_end(server: ThreadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
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


@pytest.mark.parametrize("loop", ["installed", "asyncio"])  # uvloop comes with Ray
def test_connections_that_ask_nothing_never_lock_others_out(tiny_engine: Path, tmp_path: Path, loop: str) -> None:
    options = ("--max-requests", "16")
    if loop == "asyncio":
        (tmp_path / "uvloop.py").write_text("raise ImportError")
    with ProcessServer(tiny_engine, *options, files=64 + 16 + 16, env={"PYTHONPATH": str(tmp_path)}) as server:
        host, port = server.url.removeprefix("http://").split(":")
        idle: list[socket.socket] = []
        for crowd in (10, 40, 150):
            server.process.send_signal(signal.SIGSTOP)  # so that they come at once
            for _ in range(crowd):
                idle.append(socket.create_connection((host, int(port)), WAIT_S))
                idle[-1].sendall(b"GET /health HTTP/1.1\r\nHost: ")
            server.process.send_signal(signal.SIGCONT)
            assert httpx.get(f"{server.url}/health", timeout=WAIT_S).status_code == 200
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 3}, timeout=WAIT_S)
        assert answer.status_code == 200
        for connection in idle:
            connection.close()
        server.terminate()
        assert server.wait() == (0, "")


def test_too_few_file_descriptors_are_refused(tiny_engine: Path) -> None:
    with ProcessServer(tiny_engine, "--max-requests", "16", files=95) as server:
        code, error = server.wait()
    assert (code, error) == (
        2,
        "error: 16 requests under way need 96 file descriptors, and this process may have 95; raise that (ulimit -n), "
        "or lower --max-requests\n",
    )
