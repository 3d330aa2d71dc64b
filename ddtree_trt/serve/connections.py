"""Connections: uvicorn's, that end when no request comes by them, and whose client may end its own half early."""

from __future__ import annotations

import asyncio
import resource
import socket
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ddtree_trt.errors import UsageError

HEAD_S = 10.0  # for the head of a request, from the connection's beginning or the answer before
_OTHER_FILES = 64  # of the engine, the listener, and processes for chat templates
_SPARE = 16  # connections beyond those of the requests under way, for /health and refusals
_LOOK_S = 0.05  # how often a half-closed connection is looked at
_CLOSE_WAIT = 8  # Linux: the state of a socket whose peer sends no more and may still read


class Connections:
    """The connections of one server that wait for a request, the one that has waited longest first.

    Each may wait for HEAD_S, and is cut off when the process has as many connections as it has file descriptors for:
    however many of them send nothing, or a part of a head, new ones are answered.
    """

    def __init__(self, max_requests: int) -> None:
        """Raises UsageError where the process cannot have a connection for each of `max_requests`."""
        needed = _OTHER_FILES + _SPARE + max_requests
        files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY and files < needed:
            files = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
            if files < needed:
                raise UsageError(
                    f"{max_requests} requests under way need {needed} file descriptors, and this process may have "
                    f"{files}; raise that (ulimit -n), or lower --max-requests"
                )
        self.most = None if files == resource.RLIM_INFINITY else files - _OTHER_FILES
        self.waiting: dict[Connection, asyncio.TimerHandle] = {}

    def protocol(self) -> Any:
        """What makes a connection, for uvicorn's configuration."""
        return partial(Connection, self)


class Connection(H11Protocol):
    """One connection. Bytes of a head do not renew its time."""

    def __init__(self, others: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._others = others

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        others = self._others
        if others.most is not None and len(self.connections) > others.most and others.waiting:
            oldest = next(iter(others.waiting))
            oldest.transport.abort()
            oldest._wait_or_not()
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

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_or_not(self) -> None:
        waiting = self._others.waiting
        if self._answering or self.transport.is_closing():
            if (timer := waiting.pop(self, None)) is not None:
                timer.cancel()
        elif self not in waiting:
            waiting[self] = self.loop.call_later(HEAD_S, self.transport.close)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; returns whether its answer is still to be sent.

        A client that has gone says the same. What it is sent tells: its system then resets the connection. So it is
        sent something that changes no answer, unless it is of HTTP/1.0, which has no such thing, and counts as gone.
        """
        cycle = self.cycle
        if not self._answering or cycle.more_body or cycle.scope["http_version"] == "1.0":
            return False
        if not cycle.response_started:
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])))
        elif cycle.scope["state"].get("streams"):  # a comment among the events
            self.transport.write(self.conn.send(h11.Data(b":\n\n")))
        self._look()
        return True

    def _look(self) -> None:
        """Close the connection when its client has gone, or has its answer."""
        if self.transport.is_closing():
            return
        peer = self.transport.get_extra_info("socket")
        if peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _CLOSE_WAIT:
            self.transport.abort()
        elif not self._answering:
            self.transport.close()
        else:
            self.loop.call_later(_LOOK_S, self._look)
