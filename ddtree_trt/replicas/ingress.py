"""The one address in front of the engines: chooses an engine for each request, and passes its answer on."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.replicas.engine_app import Call
from ddtree_trt.replicas.pages import ACCEPT, merge
from ddtree_trt.serve.errors import CLOSE, SERVER, ApiError, overloaded, shutting_down
from ddtree_trt.serve.limits import OPEN, Gate, with_origins
from ddtree_trt.serve.metrics import Metrics
from ddtree_trt.serve.openai.body import read
from ddtree_trt.serve.options import ServeOptions
from ddtree_trt.serve.playground.routes import PAGE

_KEY_CHARACTERS = 4096  # of a prompt's beginning, by which its engine is chosen
_ANSWER_S = 5.0  # timeout for /health and /metrics: with no engine running nothing would answer
_OWN_REQUEST_ID = b"x-request-id"  # Ray adds one to every answer, by which its logs name the request

log = logging.getLogger(__name__)


class Ingress:
    """A Ray Serve deployment with the server's limits, before a deployment of engines."""

    def __init__(self, engines: DeploymentHandle[Any], engine_dir: Path, options: ServeOptions) -> None:
        self._engines = engines
        self._respond = engines.options(method_name="respond", stream=True)
        self._metrics = Metrics(load_manifest(engine_dir))
        self._gate = Gate(self._answer, options, self._metrics)
        self._app = with_origins(self._gate, options)
        self._without_requests = Starlette()  # answers what is not HTTP, the server's start and end among it

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and wait until those open have finished. After `timeout_s`, end the rest."""
        await self._gate.drain(timeout_s)

    async def end_all(self) -> None:
        """End all open requests with an error for their clients."""
        self._gate.end_all()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._without_requests(scope, receive, send)
        elif scope["path"] in (*OPEN, *PAGE):  # without a key, so without a body
            try:
                await asyncio.wait_for(self._watch(scope, receive, send), _ANSWER_S)
            except asyncio.TimeoutError:
                await _no_engine().response()(scope, receive, send)
            except ApiError as error:
                await error.response()(scope, receive, send)
        else:
            await self._forward(scope, receive, send)

    async def _watch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer whoever watches the server: the draining, and everybody's figures, are the ingress's own."""
        if scope["path"] == "/health" and self._gate.draining:
            raise shutting_down()
        if (scope["method"], scope["path"]) != ("GET", "/metrics"):
            await self._pass_on(Call.of(scope, b""), "", send)
            return
        pages = await self._engines.broadcast("page").results_async(return_exceptions=True)
        own = (serve.get_replica_context().replica_id.unique_id, self._metrics.page(ACCEPT)[0].decode())
        whole = [own, *(page for page in pages if not isinstance(page, BaseException))]
        text, content_type = merge(whole, Request(scope).headers.get("accept", ""))
        await Response(text, headers={"Content-Type": content_type})(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        key = await _key(request) if scope["method"] == "POST" else ""
        await self._pass_on(Call.of(scope, await request.body()), key, send)

    async def _pass_on(self, call: Call, key: str, send: Send) -> None:
        """Send an engine's answer to a call. Raises ApiError where there is none, or none that is whole."""
        begun = time.perf_counter()
        status = 0
        answer = self._respond.options(session_id=key).remote(call)
        assert isinstance(answer, DeploymentResponseGenerator)
        try:
            async for messages in answer:
                for message in messages:
                    status = message.get("status", status)
                    await send(_without_request_id(message))
        except BackPressureError as error:
            text = "all engines are busy and as many requests wait as may; try again later"
            raise overloaded(text, self._metrics.retry_after_s) from error
        except RayTaskError as error:
            log.error("a request failed in its engine's process", exc_info=error)
            raise ApiError(500, "the request failed; the log says more", kind=SERVER, code="internal_error") from error
        except (RayError, RayServeException) as error:
            log.error("an engine was lost: %s", error)
            raise _lost() from error
        finally:
            answer.cancel()  # a client that disconnected; without effect on an answer that is whole
        if call.method == "POST" and status == 200:
            self._metrics.took(time.perf_counter() - begun)


class _Prompt(BaseModel):
    """What a body says of its prompt. Wrong values are refused by the engine's application, not here."""

    messages: Any = None
    prompt: Any = None
    prompt_cache_key: Any = None


async def _key(request: Request) -> str:
    """A text that is equal for requests whose prompts share a beginning worth sharing a cache for: the turns of one
    chat, or one prompt with different endings. "" where the body says nothing of that."""
    try:
        body = await read(request, _Prompt)
    except ApiError:
        return ""
    if isinstance(body.prompt_cache_key, str) and body.prompt_cache_key:
        return json.dumps(body.prompt_cache_key)[:_KEY_CHARACTERS]  # any text, lone surrogates too, as ASCII
    beginning = _first_turn(body.messages) if isinstance(body.messages, list) else body.prompt
    if isinstance(beginning, str | list) and beginning:
        return json.dumps(beginning[:_KEY_CHARACTERS])[:_KEY_CHARACTERS]
    return ""


def _first_turn(messages: list[Any]) -> list[Any]:
    """The messages up to the user's first, which every later turn of the chat repeats."""
    roles = [m.get("role") if isinstance(m, dict) else None for m in messages]
    return messages[: roles.index("user") + 1] if "user" in roles else messages


def _without_request_id(message: Message) -> Message:
    if message["type"] != "http.response.start":
        return message
    return {**message, "headers": [(k, v) for k, v in message["headers"] if k.lower() != _OWN_REQUEST_ID]}


def _lost() -> ApiError:
    headers = {"Retry-After": "1", **CLOSE}
    text = "the engine that answered was lost; send the request again, and another will answer"
    return ApiError(503, text, kind=SERVER, code="engine_lost", headers=headers)


def _no_engine() -> ApiError:
    text = f"no engine answered within {_ANSWER_S:g} s"
    return ApiError(503, text, kind=SERVER, code="no_engine", headers={"Retry-After": "5"})
