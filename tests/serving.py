"""A real server on a free loopback port, in a thread or as a process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from ddtree_trt.runtime.async_llm import AsyncLLM
from ddtree_trt.serve.options import ServeOptions
from ddtree_trt.serve.server import Server, listen, make_server

LONG = {"max_tokens": 1900, "ignore_eos": True, "temperature": 0}  # keeps a slot for as long as a test needs it


class ThreadServer:
    """A server in this process, whose engine a test can look into and slow down."""

    def __init__(self, server: Server, address: str, client: httpx.Client) -> None:
        self.server, self.url, self.http = server, address, client
        self.llm: AsyncLLM = server.llm

    def chat(self, prompt: str = "hello", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": prompt}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def figures(self) -> dict[str, float]:
        return metrics(self.http)

    def raw(self, body: bytes, path: str = "/v1/chat/completions", receive_buffer: int = 0) -> socket.socket:
        """A bare connection that has sent a request and read nothing."""
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        connection = socket.socket()
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect((host, int(port)))
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        return connection


@contextlib.contextmanager
def thread_server(engine: Path, *, round_s: float = 0.0, **options: Any) -> Iterator[ThreadServer]:
    """Serve in a thread; every target pass takes `round_s` longer, so that a test is faster than a request."""
    chosen = replace(ServeOptions(port=0, drain_timeout_s=5), **options)
    with listen(chosen) as listener:
        server = make_server(engine, chosen, listener)
        if round_s:
            slow_down(server.llm, round_s)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        host, port = listener.getsockname()
        address = f"http://{host}:{port}"
        headers = {"Authorization": f"Bearer {chosen.api_key}"} if chosen.api_key else {}
        try:
            wait_for(lambda: server.started)
            with httpx.Client(base_url=address, timeout=60, headers=headers) as client:
                yield ThreadServer(server, address, client)
        finally:
            server.drain()
            server.drain()  # the second one does not wait for requests under way
            thread.join(30)
        assert not thread.is_alive(), "the server did not end"


def slow_down(llm: AsyncLLM, seconds: float) -> None:
    verify = llm.engine.verify

    def slowly(requests: Any) -> Any:
        time.sleep(seconds)
        return verify(requests)

    llm.engine.verify = slowly  # type: ignore[method-assign]


class ProcessServer:
    """`ddtree-trt serve` as its user starts it."""

    def __init__(self, engine: Path, *options: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "ddtree_trt.cli", "serve", str(engine), "--port", "0", *options]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env={**os.environ, **(env or {})}, **pipes)
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        self.url = self.ready.split()[-1] if self.ready else ""

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = 30) -> tuple[int, str]:
        """Exit code and what was written to stderr."""
        _, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, errors

    def __enter__(self) -> ProcessServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def metrics(client: httpx.Client) -> dict[str, float]:
    """The samples of the metrics page by name with labels."""
    lines = client.get("/metrics").text.splitlines()
    return {k: float(v) for k, _, v in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def wait_for(condition: Callable[[], bool], timeout: float = 15.0) -> None:
    """Until the condition holds; fails the test when it does not."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.005)
