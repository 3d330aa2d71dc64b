"""The gate in front of the API: keys, limits on sizes, numbers and times, and detection of disconnected clients.

An ASGI middleware, because a client that disconnects ends its request at once, streaming or not. uvicorn's
`limit_concurrency` counts connections, those of `/health` too, and refuses in plain text.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ddtree_trt.serve.errors import CLOSE, ApiError, overloaded, shutting_down
from ddtree_trt.serve.metrics import Metrics
from ddtree_trt.serve.openai.answers import event
from ddtree_trt.serve.options import ServeOptions
from ddtree_trt.serve.playground.routes import PAGE

_SEND_ERROR_S = 1.0  # timeout for the rest of a refused body, and for the error that ended a request
_SEND_ERRORS_S = 1.5  # timeout for the errors of all requests that a drain ended


def with_origins(gate: Gate, options: ServeOptions) -> ASGIApp:
    """The gate with the answers of CORS, where origins are allowed: what browsers ask beforehand needs no key."""
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
    """Counts and bounds the open requests. `close` releases the engine, where no server ends the application.

    A request ends when its answer is complete, its client disconnects, its time is up or `end_all` is called; then the
    exit stack `scope["state"]["cleanup"]`, to which the endpoint adds contexts, is closed.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: Metrics, close: Callable[[], None]) -> None:
        self._app = app
        self._options = options
        self.metrics = metrics
        self.close = close
        # Always answered, without a key: for monitoring, and a page that asks for the key.
        self._open = {"/health", "/metrics", *(PAGE if options.playground else ())}
        self._key = None if options.api_key is None else f"Bearer {options.api_key}".encode()
        self._under_way: set[asyncio.Task[None]] = set()
        self.idle = asyncio.Event()  # while no request is open
        self.idle.set()
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, send, self.metrics)
        if (refusal := self._refusal(scope)) is not None:
            if b"expect" not in dict(scope["headers"]):  # with it, the client waits for permission and has sent nothing
                await _read(receive, -1)
            await answer.send_error(refusal)
            return
        limit_s = self._options.request_timeout_s
        work = asyncio.ensure_future(self._respond(scope, receive, answer))
        self._under_way.add(work)
        self.idle.clear()
        try:
            in_time, _ = await asyncio.wait({work}, timeout=limit_s or None)
            work.cancel()
            await asyncio.wait({work})
            error = work.exception() if not work.cancelled() else shutting_down() if in_time else _timed_out(limit_s)
            if isinstance(error, ApiError):
                with suppress(TimeoutError):  # the server closes the connection of an incomplete answer
                    await asyncio.wait_for(answer.send_error(error), _SEND_ERROR_S)
            elif error is not None and not answer.complete:
                raise error  # the server then closes the connection
        finally:
            work.cancel()
            self._under_way.discard(work)
            if not self._under_way:
                self.idle.set()

    def _refusal(self, scope: Scope) -> ApiError | None:
        """The error for a refused request; None for an accepted one."""
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        if self._key is not None and not hmac.compare_digest(given[:6].title() + given[6:], self._key):
            message = "missing or wrong API key; send it as: Authorization: Bearer KEY"
            return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer", **CLOSE})
        if self.draining:
            return shutting_down()
        if len(self._under_way) >= self._options.max_requests:
            message = f"{len(self._under_way)} requests are under way, as many as this server takes; try again later"
            return overloaded(message, **CLOSE)  # the rest of the body will not be read
        return None

    async def _respond(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        """Answer a request whose client stays. Raises what the application raises."""
        if (body := await _read(receive, self._options.max_body_bytes)) is None:
            return
        if len(body) > self._options.max_body_bytes:
            message = f"the body is larger than the {self._options.max_body_bytes} bytes this server takes"
            raise ApiError(413, message, code="body_too_large", headers=CLOSE)
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:  # a second call never returns: the connection is watched here
            return whole.pop() if whole else await asyncio.get_running_loop().create_future()

        async def disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        with ExitStack() as cleanup:
            scope = {**scope, "state": {**scope.get("state", {}), "cleanup": cleanup}}
            work = asyncio.ensure_future(self._app(scope, replay, answer.send))
            ends: set[asyncio.Future[Any]] = {work, asyncio.ensure_future(disconnect())}
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in ends:
                    task.cancel()
                await asyncio.wait(ends)
        if not work.cancelled():
            work.result()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests from now on, and wait until those open have finished. After `timeout_s`, end the rest."""
        self.draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self.idle.wait(), timeout_s)
        self.end_all()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.idle.wait(), _SEND_ERRORS_S)

    def end_all(self) -> None:
        for work in self._under_way:
            work.cancel()


def _timed_out(seconds: float) -> ApiError:
    message = f"the request took longer than this server's limit of {seconds:g} s and was ended"
    return ApiError(504, message, code="timeout", headers=CLOSE)


class _Answer:
    """Sends an answer, and records its progress."""

    def __init__(self, scope: Scope, send: Send, metrics: Metrics) -> None:
        self._scope = scope
        self._send = send
        self._metrics = metrics
        self._streams = False  # whether it is a stream of events
        self.started = False
        self.complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            content_type = dict(message["headers"]).get(b"content-type", b"")
            self._streams = content_type.startswith(b"text/event-stream")
            if message["status"] >= 400:
                self._metrics.refused(message["status"])
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True

    async def send_error(self, error: ApiError) -> None:
        """Send the error, as the answer or as a stream's last event. No [DONE] follows it."""
        if not self.started:
            await error.response()(self._scope, _nothing, self.send)
        elif self._streams and not self.complete:
            body = event(error.body()).encode()
            await self.send({"type": "http.response.body", "body": body, "more_body": False})


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


async def _read(receive: Receive, most_bytes: int) -> bytes | None:
    """The body, or more than `most_bytes` of one that is larger; None where the client has gone.

    The rest of a larger one is read for a moment, and dropped: a connection closed with unread bytes in it is reset,
    and a client that is still sending then never sees the answer.
    """
    body, more = bytearray(), True
    with suppress(TimeoutError):
        async with asyncio.timeout(None) as limit:
            while more:
                if len(body) > most_bytes and limit.when() is None:
                    limit.reschedule(asyncio.get_running_loop().time() + _SEND_ERROR_S)
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                del body[most_bytes + 1 :]
                more = message.get("more_body", False)
    return bytes(body)
