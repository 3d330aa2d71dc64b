"""An engine that answers parts of an offline run."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from ddtree_trt.errors import EngineError
from ddtree_trt.replicas.engine_app import Call, EngineApp
from ddtree_trt.replicas.requests import OfflineRequest, answer_line
from ddtree_trt.serve.options import ServeOptions

_END_S = 10.0  # for requests to notice that their engine has ended
PARTS_AT_A_TIME = 2  # per engine: while the last rows of one part are decoded, those of the next take the free slots


class PartWorker:
    """An engine with the server's application and an event loop for it. Called from any number of threads at once."""

    def __init__(self, engine_dir: Path, options: ServeOptions) -> None:
        self._app = EngineApp(engine_dir, options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ddtree-offline", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._app.start(), self._loop).result()

    def __call__(self, part: str) -> str:
        """The answers to a part's requests, a line each. Raises EngineError when the engine fails."""
        requests = [OfflineRequest.parse(line) for line in part.split("\n")]
        return asyncio.run_coroutine_threadsafe(self._answer(requests), self._loop).result()

    def close(self) -> None:
        """End the engine and the parts under way, whose callers get an error or what was answered."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _end(self) -> None:
        await self._app.stop()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        if rest:  # what they wait for has ended
            _, late = await asyncio.wait(rest, timeout=_END_S)
            for task in late:
                task.cancel()

    async def _answer(self, requests: list[OfflineRequest]) -> str:
        tasks = [asyncio.ensure_future(self._one(request)) for request in requests]
        try:
            return "".join(f"{line}\n" for line in await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, request: OfflineRequest) -> str:
        status, body = await self._app.answer(Call("POST", request.url, request.body.encode()))
        if status >= 500:
            raise EngineError(f"request {request.custom_id}: {body.decode(errors='replace')}")
        return answer_line(request, status, body)
