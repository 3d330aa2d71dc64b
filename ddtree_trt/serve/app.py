"""The ASGI application: routes, error handlers, and the lifetime of the engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse, Response

from ddtree_trt import __version__
from ddtree_trt.artifact.examples import read_examples
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.runtime.async_llm import AsyncLLM
from ddtree_trt.runtime.request_maker import Request as EngineRequest
from ddtree_trt.runtime.text import chat_template
from ddtree_trt.serve import errors
from ddtree_trt.serve.errors import ApiError
from ddtree_trt.serve.limits import Gate
from ddtree_trt.serve.metrics import PAGE_TYPE, Metrics, log_request
from ddtree_trt.serve.openai.chat import chat
from ddtree_trt.serve.openai.completions import complete, detokenize, tokenize
from ddtree_trt.serve.openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, read
from ddtree_trt.serve.options import ServeOptions
from ddtree_trt.serve.playground import routes as playground
from ddtree_trt.serve.service import Service

MetricsPage = Callable[[], Awaitable[bytes]]
_REF = "#/components/schemas/{model}"
_POSTS: dict[str, tuple[type[BaseModel], Callable[[Service, Request, Any], Awaitable[Response]]]] = {
    "/v1/chat/completions": (ChatRequest, chat),
    "/v1/completions": (CompletionRequest, complete),
    "/tokenize": (TokenizeRequest, tokenize),
    "/detokenize": (DetokenizeRequest, detokenize),
}


def open_app(
    engine_dir: Path, options: ServeOptions, progress: Progress = no_progress, metrics_page: MetricsPage | None = None
) -> tuple[AsyncLLM, Gate]:
    """Load an engine; returns it and its ASGI application, which shuts it down when it ends. `progress` and errors are
    those of AsyncLLM. `metrics_page` is answered to scrapers in place of the page of this engine alone."""
    manifest = load_manifest(engine_dir)
    metrics = Metrics(manifest, options.model_name or manifest.name)

    def finished(request: EngineRequest) -> None:
        metrics.finished(request)
        log_request(request)

    chat_template.start_for(engine_dir)  # at the same time as the engine is loaded
    examples = read_examples(engine_dir) if options.playground else None
    llm = AsyncLLM(engine_dir, options, progress=progress, max_waiting=options.max_waiting, on_finished=finished)
    if options.chat_template is not None:
        llm.codec.use_template(options.chat_template)
    if llm.tokenizer.chat_template:
        chat_template.wait()
    service = Service(llm, options)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        metrics.watch(llm)
        yield
        await asyncio.to_thread(service.close)

    # No redirects to paths with or without a slash: their host would be that of the Host header.
    app = _App(
        title="ddtree-trt", version=__version__, lifespan=life, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    gate = Gate(app, options, metrics, service.close)
    errors.install(app, lambda: metrics.retry_after_s)

    def post(path: str, model: type[BaseModel], answer: Callable[[Service, Request, Any], Awaitable[Response]]) -> None:
        """Add an endpoint that parses its body itself; the description says what that is."""
        content = {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}
        described = {"requestBody": {"required": True, "content": content}}

        @app.post(path, response_class=JSONResponse, openapi_extra=described, name=path)
        async def endpoint(request: Request) -> Response:
            return await answer(service, request, await read(request, model))

    for path, (model, answer) in _POSTS.items():
        post(path, model, answer)

    card = {"id": service.model_name, "object": "model", "created": int(time.time()), "owned_by": "ddtree-trt"}
    card |= {"max_model_len": service.max_seq_len}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model_card(name: str) -> dict[str, Any]:
        service.check_model(name)
        return card

    @app.get("/health")
    async def health() -> JSONResponse:
        if llm.failure is not None:
            raise ApiError(503, str(llm.failure), code="engine_error")
        if gate.draining:
            raise errors.shutting_down()
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def prometheus() -> Response:
        page = metrics.page() if metrics_page is None else await metrics_page()
        return Response(page, headers={"Content-Type": PAGE_TYPE})

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    if options.playground:
        playground.install(app, service, examples)
    return llm, gate


class _App(FastAPI):
    """The application, whose description has the bodies that the endpoints parse themselves."""

    def openapi(self) -> dict[str, Any]:
        schema = super().openapi()
        _, own = models_json_schema([(model, "validation") for model, _ in _POSTS.values()], ref_template=_REF)
        schema["components"]["schemas"] |= own["$defs"]
        return schema
