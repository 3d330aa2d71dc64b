"""A real server on a free loopback port, in a thread or as a process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from pacing import WAIT_S, Passes, wait_for

from ddtree_trt.runtime.async_llm import AsyncLLM
from ddtree_trt.serve.options import ServeOptions
from ddtree_trt.serve.server import Server, listen, make_server

# Keeps a slot for as long as a test needs it: one token a round.
LONG: dict[str, Any] = {"max_tokens": 1900, "ignore_eos": True, "temperature": 0, "method": "ar"}


class ThreadServer:
    """A server in this process, whose engine a test can look into, slow down and hold."""

    def __init__(self, server: Server, address: str, client: httpx.Client, passes: Passes) -> None:
        self.server, self.url, self.http, self.passes = server, address, client, passes
        self.llm: AsyncLLM = server.llm

    @property
    def idle(self) -> bool:
        """Whether no HTTP request is under way."""
        return self.server._gate.idle.is_set()

    def ended(self) -> float:
        """How many sequences have ended so far, in whatever way."""
        return sum(v for k, v in self.figures().items() if k.startswith("vllm:request_success_total"))

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
    chosen = replace(ServeOptions(port=0), **options)
    with listen(chosen) as listener:
        server = make_server(engine, chosen, listener)
        passes = Passes(server.llm.engine, round_s)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        host, port = listener.getsockname()
        address = f"http://{host}:{port}"
        headers = {"Authorization": f"Bearer {chosen.api_key}"} if chosen.api_key else {}
        try:
            wait_for(lambda: server.started)
            with httpx.Client(base_url=address, timeout=WAIT_S, headers=headers) as client:
                yield ThreadServer(server, address, client, passes)
        finally:
            passes.release()
            server.drain()
            server.drain()  # the second one does not wait for requests under way
            thread.join(WAIT_S)
        assert not thread.is_alive(), "the server did not end"


def events_of(stream: str) -> list[Any]:
    """What the events of a stream say, without its [DONE]."""
    return [json.loads(e.removeprefix("data: ")) for e in stream.split("\n\n") if e.startswith("data: {")]


def long_chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hello"}], **LONG, **fields}).encode()


def hold(server: ThreadServer, requests: int, **fields: Any) -> list[socket.socket]:
    """Connections with long streams under way."""
    before = server.llm.running + server.llm.waiting
    held = [server.raw(long_chat(stream=True, **fields)) for _ in range(requests)]
    wait_for(lambda: server.llm.running + server.llm.waiting == before + requests)
    return held


def release(held: list[socket.socket]) -> None:
    for connection in held:
        connection.close()


def read_all(connection: socket.socket) -> bytes:
    """What still comes until the other side ends the connection, in whatever way."""
    data = b""
    connection.settimeout(WAIT_S)
    try:
        while chunk := connection.recv(1 << 20):
            data += chunk
    except ConnectionResetError:
        pass
    connection.close()
    return data


# Code that has the passes of engines wait while a file exists, for at most some seconds each.
HELD = """
import pathlib, time
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
verify = OrtEngine.verify
def held(self, requests):
    end = time.monotonic() + {seconds}
    while pathlib.Path({file!r}).exists() and time.monotonic() < end:
        time.sleep(0.005)
    return verify(self, requests)
OrtEngine.verify = held
"""


class ProcessServer:
    """`ddtree-trt serve` as its user starts it. While the file `hold` exists, a pass waits for up to `hold_s` seconds;
    `code` runs before the command line."""

    def __init__(
        self,
        engine: Path,
        *options: str,
        env: dict[str, str] | None = None,
        hold: Path | None = None,
        hold_s: float = WAIT_S,
        code: str = "",
    ) -> None:
        if hold is not None:
            code = HELD.format(file=str(hold), seconds=hold_s)
        code += "\nfrom ddtree_trt.cli import main\nmain()"
        command = [sys.executable, "-c", code, "serve", str(engine), "--port", "0", "--no-request-log", *options]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env={**os.environ, **(env or {})}, **pipes)
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        self.url = self.ready.split()[-1] if self.ready else ""

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = WAIT_S) -> tuple[int, str]:
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
    """The samples of the metrics page by name, with the labels in which they differ."""
    page = re.sub(r'engine="0",(.*?)model_name="[^"]*",?', r"\1", client.get("/metrics").text)
    lines = re.sub(r",?\}", "}", page).replace("{}", "").splitlines()
    return {k: float(v) for k, _, v in (line.rpartition(" ") for line in lines if not line.startswith("#"))}
