"""The server's ASGI application with its engine, called by objects that can be sent to another process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from starlette.types import Message, Scope
from uvicorn import Config
from uvicorn.lifespan.on import LifespanOn

from ddtree_trt.errors import EngineError
from ddtree_trt.serve.app import open_app
from ddtree_trt.serve.options import ServeOptions


@dataclass(frozen=True)
class Call:
    """An HTTP request."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)
    query: bytes = b""

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> Call:
        headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
        return cls(scope["method"], scope["path"], body, headers, scope["query_string"])

    def scope(self) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": None,
            "server": None,
        }


class EngineApp:
    """An engine with its application. `start` and all that follows is called on one event loop.

    Errors of the constructor are those of AsyncLLM.
    """

    def __init__(self, engine_dir: Path, options: ServeOptions) -> None:
        self.llm, self.gate = open_app(engine_dir, options, counts_answers=False)
        self._life = LifespanOn(Config(self.gate, lifespan="on", log_config=None))

    async def start(self) -> None:
        await self._life.startup()
        if self._life.should_exit:
            raise EngineError("the server's application did not start; the log says why")

    async def stop(self) -> None:
        """Close the engine."""
        await self._life.shutdown()

    async def respond(self, call: Call) -> AsyncIterator[list[Message]]:
        """Yield the ASGI messages of the answer, each time all that have come since the last.

        Closing the iterator ends the request, as a client does that disconnects. Raises what the application raises.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        body: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            return body.pop() if body else await asyncio.get_running_loop().create_future()

        work = asyncio.ensure_future(self.gate(call.scope(), receive, messages.put))
        work.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                batch = [message]
                while not messages.empty() and (more := messages.get_nowait()) is not None:
                    batch.append(more)
                yield batch
                if work.done() and messages.empty():
                    break
            work.result()
        finally:
            work.cancel()
            await asyncio.wait({work})

    async def answer(self, call: Call) -> tuple[int, bytes]:
        """Status and body of the whole answer. Raises what the application raises."""
        messages = [m async for batch in self.respond(call) for m in batch]
        return messages[0]["status"], b"".join(m.get("body", b"") for m in messages[1:])

    async def check_health(self) -> None:
        """Raises RuntimeError when the application's own `/health` says that the engine does not serve."""
        status, body = await self.answer(Call("GET", "/health"))
        if status != 200:
            raise RuntimeError(f"/health answered {status}: {body.decode(errors='replace')}")
