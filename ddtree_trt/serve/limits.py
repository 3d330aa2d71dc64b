"""The gate in front of the API: keys, limits on sizes, numbers and times, and detection of disconnected clients.

An ASGI middleware rather than a framework's hooks, because it must watch the connection while the answer is being made:
a client that disconnects ends its request at once, streaming or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from contextlib import ExitStack
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ddtree_trt.serve.errors import CLOSE, ApiError, overloaded, shutting_down, timed_out
from ddtree_trt.serve.metrics import Metrics
from ddtree_trt.serve.openai.answers import event
from ddtree_trt.serve.options import ServeOptions
from ddtree_trt.serve.playground.routes import PAGE

OPEN = ("/health", "/metrics")  # always answered, without a key: for monitoring
_SEND_ERROR_S = 1.0  # timeout for the error that ended a request: a client may not read
_SEND_ERRORS_S = 1.5  # timeout for the errors of all requests that a drain ended
_LINGER_BYTES = 32 << 20  # of a refused body that are still read, so that a client that is sending it sees the answer


def with_origins(gate: Gate, options: ServeOptions) -> ASGIApp:
    """The gate for browsers too, where origins are allowed: its answers say so, and what browsers ask before they call
    is answered without a key."""
    if not options.origins:
        return gate
    return CORSMiddleware(
        gate,
        allow_origins=options.origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After"],
    )


class Gate:
    """Counts and bounds the open requests."""

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: Metrics) -> None:
        self._app = app
        self._options = options
        self._metrics = metrics
        self._open = {*OPEN, *(PAGE if options.playground else ())}
        self._key = None if options.api_key is None else f"Bearer {options.api_key}".encode()
        self._exchanges: set[_Exchange] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        answer = _Answer(send, self._metrics)
        if refusal is not None:
            if b"expect" not in dict(scope["headers"]):  # with it, the client waits for permission and has sent nothing
                await _discard_body(receive)
            await refusal.response()(scope, receive, answer.send)
            return
        exchange = _Exchange(self._app, scope, receive, answer, self._options)
        self._exchanges.add(exchange)
        self._idle.clear()
        try:
            await exchange.run()
        finally:
            self._exchanges.discard(exchange)
            if not self._exchanges:
                self._idle.set()

    def _refusal(self, scope: Scope) -> ApiError | None:
        """The error for a refused request; None for an accepted one."""
        headers = dict(scope["headers"])
        if self._key is not None and not hmac.compare_digest(headers.get(b"authorization", b""), self._key):
            message = "missing or wrong API key; send it as: Authorization: Bearer KEY"
            return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer", **CLOSE})
        if self.draining:
            return shutting_down()
        if len(self._exchanges) >= self._options.max_requests:
            message = f"{len(self._exchanges)} requests are under way, as many as this server takes; try again later"
            refusal = overloaded(message, self._metrics.retry_after_s)
            refusal.headers.update(CLOSE)  # the rest of the body will not be read
            return refusal
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._options.max_body_bytes:
            return _body_too_large(self._options.max_body_bytes)
        return None

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests from now on, and wait until those open have finished. After `timeout_s`, end the rest."""
        self.draining = True
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        self.end_all()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), _SEND_ERRORS_S)

    def end_all(self) -> None:
        """End all open requests with an error for their clients."""
        for exchange in list(self._exchanges):
            exchange.end(shutting_down())


class _Answer:
    """Sends an answer, and records its progress."""

    def __init__(self, send: Send, metrics: Metrics) -> None:
        self._send = send
        self._metrics = metrics
        self.started = False
        self.complete = False
        self.streams = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.streams = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
            if message["status"] >= 400:
                self._metrics.refused(message["status"])
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True


class _Exchange:
    """One request with its answer. It ends when the answer is complete, the client disconnects, or `end` is called;
    then the exit stack `scope["state"]["cleanup"]`, to which the endpoint adds contexts, is closed."""

    def __init__(self, app: ASGIApp, scope: Scope, receive: Receive, answer: _Answer, options: ServeOptions) -> None:
        self._app = app
        self._scope = scope
        self._receive = receive
        self._answer = answer
        self._options = options
        loop = asyncio.get_running_loop()
        self._body: asyncio.Future[bytes] = loop.create_future()
        self._ended: asyncio.Future[ApiError] = loop.create_future()
        self._replayed = False

    def end(self, reason: ApiError) -> None:
        """End the exchange, with this error for the client. Later calls have no effect."""
        if not self._ended.done():
            self._ended.set_result(reason)

    async def run(self) -> None:
        """Answer the request. An ApiError of the application is sent as that of `end` is; another exception is raised,
        unless the answer was complete."""
        limit = self._options.request_timeout_s
        timer = asyncio.get_running_loop().call_later(limit, self.end, timed_out(limit)) if limit else None
        with ExitStack() as cleanup:
            if timer is not None:
                cleanup.callback(timer.cancel)
            scope = {**self._scope, "state": {**self._scope.get("state", {}), "cleanup": cleanup}}
            work = asyncio.ensure_future(self._app(scope, self._replay, self._answer.send))
            client = asyncio.ensure_future(self._read())
            ends: set[asyncio.Future[Any]] = {work, client, self._ended}
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (work, client):
                    task.cancel()
                await asyncio.wait({work, client})
        error = next((t.exception() for t in (work, client) if not t.cancelled() and t.exception()), None)
        if self._ended.done():
            await self._send_reason(self._ended.result())
        elif isinstance(error, ApiError):
            await self._send_reason(error)
        elif error is not None and not self._answer.complete:
            raise error  # the server then closes the connection, which a complete answer does not need

    async def _read(self) -> None:
        """Collect the body, then wait until the client disconnects."""
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > self._options.max_body_bytes:
                if message.get("more_body", False):
                    await _discard_body(self._receive)
                self.end(_body_too_large(self._options.max_body_bytes))
                return
            if not message.get("more_body", False) and not self._body.done():
                self._body.set_result(bytes(body))

    async def _replay(self) -> Message:
        """The whole body as one message. A second call never returns: the gate watches the connection."""
        if self._replayed:
            await asyncio.get_running_loop().create_future()
        self._replayed = True
        return {"type": "http.request", "body": await self._body, "more_body": False}

    async def _send_reason(self, reason: ApiError) -> None:
        """Send the error, as the answer or as a stream's last event. It is dropped where the client does not read; the
        server closes the connection of an incomplete answer."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._send_error(reason), _SEND_ERROR_S)

    async def _send_error(self, reason: ApiError) -> None:
        if not self._answer.started:
            await reason.response()(self._scope, self._receive, self._answer.send)
        elif self._answer.streams and not self._answer.complete:
            body = event(reason.body()).encode()
            await self._answer.send({"type": "http.response.body", "body": body, "more_body": False})


async def _discard_body(receive: Receive) -> None:
    """Read what is left of a refused body, within bounds. A connection closed with unread bytes in it is reset, and a
    client that is still sending then never sees the answer."""

    async def rest() -> None:
        read = 0
        while read < _LINGER_BYTES:
            message = await receive()
            read += len(message.get("body", b""))
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(rest(), _SEND_ERROR_S)


def _body_too_large(limit: int) -> ApiError:
    message = f"the body is larger than the {limit} bytes this server takes"
    return ApiError(413, message, code="body_too_large", headers=CLOSE)
