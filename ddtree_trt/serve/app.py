"""The ASGI application: routes, error handlers, and the lifetime of the engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

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
_POSTS: dict[str, tuple[type[Any], Callable[[Service, Request, Any], Awaitable[Response]]]] = {
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
    async def life(_: Starlette) -> AsyncIterator[None]:
        metrics.watch(llm)
        yield
        await asyncio.to_thread(service.close)

    card = {"id": service.model_name, "object": "model", "created": int(time.time()), "owned_by": "ddtree-trt"}
    card |= {"max_model_len": service.max_seq_len}

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    async def model_card(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return JSONResponse(card)

    async def health(_: Request) -> Response:
        if llm.failure is not None:
            raise ApiError(503, str(llm.failure), code="engine_error")
        if gate.draining:
            raise errors.shutting_down()
        return JSONResponse({"status": "ok"})

    async def prometheus(_: Request) -> Response:
        page = metrics.page() if metrics_page is None else await metrics_page()
        return Response(page, headers={"Content-Type": PAGE_TYPE})

    async def version(_: Request) -> Response:
        return JSONResponse({"version": __version__})

    def post(path: str, model: type[Any], answer: Callable[[Service, Request, Any], Awaitable[Response]]) -> Route:
        async def endpoint(request: Request) -> Response:
            return await answer(service, request, await read(request, model))

        return Route(path, endpoint, methods=["POST"])

    gets = {"/v1/models": models, "/v1/models/{name:path}": model_card, "/health": health, "/metrics": prometheus}
    routes = [Route(path, answer) for path, answer in {**gets, "/version": version}.items()]
    routes += [post(path, model, answer) for path, (model, answer) in _POSTS.items()]
    if options.playground:
        routes += playground.routes(service, examples)
    app = Starlette(routes=routes, lifespan=life, exception_handlers=errors.HANDLERS)
    app.router.redirect_slashes = False  # the host of a redirect would be that of the Host header
    gate = Gate(app, options, metrics, service.close)
    return llm, gate
