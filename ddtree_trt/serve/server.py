"""The server process: socket, signals, drain and exit."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import math
import resource
import socket
import time
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.async_llm import AsyncLLM
from ddtree_trt.runtime.decoding.routing import engine_host_reason
from ddtree_trt.serve.app import open_app
from ddtree_trt.serve.limits import Gate, with_origins
from ddtree_trt.serve.metrics import show_requests
from ddtree_trt.serve.options import ServeOptions
from ddtree_trt.terminal.printing import progress_bars
from ddtree_trt.worker_process import limit

_SEND_BUFFER_BYTES = 256 << 10  # of the kernel, per connection: it would grow to megabytes for a slow reader
_OTHER_FILES = 80  # of the engine, the listener, other processes, and connections beyond those of the requests
_FLUSH_S = 2  # timeout for connections to send their buffers
_END_S = 4.5  # from the drain timeout's end, or a second signal, to when the process is ended whatever it is doing


def serve_engine(engine_dir: Path, options: ServeOptions) -> None:
    """Serve an engine until a signal ends it. Raises ArtifactError, and UsageError for the address."""
    if options.request_log:
        show_requests()
    with listen(options) as listener:
        with progress_bars() as progress:
            server = make_server(engine_dir, options, listener, progress)
        # Objects that live as long as the process are excluded from later collections, which stop all threads.
        gc.collect()
        gc.freeze()
        server.run(sockets=[listener])


def make_server(
    engine_dir: Path, options: ServeOptions, listener: socket.socket, progress: Progress = no_progress
) -> Server:
    """Load the engine and put a server in front of it. `progress` and errors are those of AsyncLLM."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY:
        limit(resource.RLIMIT_NOFILE, max(files, _OTHER_FILES + options.max_requests))
    llm, gate = open_app(engine_dir, options, progress)
    config = uvicorn.Config(
        with_origins(gate, options),
        http=Connection,
        log_level="info" if options.access_log else "warning",
        access_log=options.access_log,
        server_header=False,
        timeout_graceful_shutdown=_FLUSH_S,
        ws="none",
    )
    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    ready = ready_line(llm, options, address)
    return Server(config, llm, gate, options.drain_timeout_s, ready)


def listen(options: ServeOptions) -> socket.socket:
    """A bound socket; its options apply to every connection it accepts. Raises UsageError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"cannot listen on {options.host}: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        # The kernel ends a connection whose peer takes nothing, or does not acknowledge, for this long.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * options.stall_timeout_s))
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {options.host} port {options.port}: {error.strerror}; choose another with --port"
        ) from error
    return listener


def ready_line(llm: AsyncLLM, options: ServeOptions, address: str) -> str:
    """What is served, within which limits, and where; the address is the last word."""
    engine, manifest = llm.engine, llm.engine.manifest
    rounds = f", device rounds {options.device_rounds}" if engine_host_reason(manifest) is None else ""
    key, page = "a key is needed; " if options.api_key else "", "/playground, " if options.playground else ""
    return (
        f"serving {options.model_name or manifest.name}: {manifest.name}, {manifest.backend} {manifest.precision}, "
        f"{engine.threads} thread{'s' * (engine.threads > 1)}{rounds}; {llm.slots} slots of "
        f"{manifest.limits.max_seq_len} tokens, {options.max_waiting} may wait; {key}{page}/v1, /health and "
        f"/metrics on {address}"
    )


HEAD_S = 10.0  # for the head of a request, from the connection's beginning or the answer before


class Connection(H11Protocol):
    """One connection. Bytes of a head do not renew its time."""

    _waits: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_or_not()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_or_not()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_or_not()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_or_not()

    def _wait_or_not(self) -> None:
        answering: Any = self.cycle is not None and not self.cycle.response_complete
        if self._waits is not None and (answering or self.transport.is_closing()):
            self._waits.cancel()
            self._waits = None
        elif self._waits is None and not (answering or self.transport.is_closing()):
            self._waits = self.loop.call_later(HEAD_S, self.transport.close)


class Server(uvicorn.Server):
    """uvicorn with draining: after a signal new requests are answered 503; a second signal ends the open ones."""

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM, gate: Gate, drain_timeout_s: float, ready: str) -> None:
        super().__init__(config)
        self.llm = llm
        self._gate = gate
        self._drain_timeout_s = drain_timeout_s
        self._ready = ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._end_s: float | None = None  # by the monotonic clock, when the process is ended

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        print(self._ready, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's signal handler. If the process is still there when its time is up, it is ended by a thread that
        needs neither the event loop nor the interpreter, with exit code 1, and says what each thread was doing."""
        allowed_s = _END_S + (self._drain_timeout_s if self._end_s is None else 0)
        self._end_s = min(self._end_s or math.inf, time.monotonic() + allowed_s)
        faulthandler.dump_traceback_later(max(self._end_s - time.monotonic(), 0.01), exit=True)
        self.drain()

    def drain(self) -> None:
        """Begin to drain, or if that has begun, end at once. Called from any thread and from signal handlers, so it
        only schedules a callback."""
        if self._loop is None:
            self.should_exit = True
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._drain_or_stop_now)

    def _drain_or_stop_now(self) -> None:
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain_and_exit())
        else:
            self._gate.end_all()

    async def _drain_and_exit(self) -> None:
        await self._gate.drain(self._drain_timeout_s)
        self.should_exit = True
