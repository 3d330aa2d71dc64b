"""Connections: uvicorn's, that end when no request comes by them."""

from __future__ import annotations

import asyncio
import resource
from functools import partial
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from ddtree_trt.errors import UsageError

HEAD_S = 10.0  # for the head of a request, from the connection's beginning or the answer before
_OTHER_FILES = 64  # of the engine, the listener, and processes for chat templates
_SPARE = 16  # connections beyond those of the requests under way, for /health and refusals


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

    def _wait_or_not(self) -> None:
        waiting = self._others.waiting
        if (self.cycle is not None and not self.cycle.response_complete) or self.transport.is_closing():
            if (timer := waiting.pop(self, None)) is not None:
                timer.cancel()
        elif self not in waiting:
            waiting[self] = self.loop.call_later(HEAD_S, self.transport.close)
