"""Connections: uvicorn's, that end when no request comes by them."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

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
