"""Routes of the playground: the page's files, what it must know of the engine, and rounds as they happen."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.resources import files
from typing import Any, Literal

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from ddtree_trt.artifact.examples import Examples
from ddtree_trt.device.cpu import busy_warning, usable_cores
from ddtree_trt.runtime.chat.tools import ToolUse
from ddtree_trt.runtime.decoding.loop import Round
from ddtree_trt.runtime.decoding.methods import METHODS
from ddtree_trt.runtime.structured.names import STRUCTURED, given_name
from ddtree_trt.runtime.submission import Submission
from ddtree_trt.serve.openai.answers import event, finish_reason, new_id, stream_response
from ddtree_trt.serve.openai.body import read
from ddtree_trt.serve.openai.protocol import ChatRequest
from ddtree_trt.serve.playground.records import figures, round_record
from ddtree_trt.serve.service import Service

PATH = "/playground"
PAGE = {
    **dict.fromkeys(("/", PATH), ("page.html", "text/html; charset=utf-8")),
    f"{PATH}/page.css": ("page.css", "text/css; charset=utf-8"),
    **{f"{PATH}/{name}": (name, "text/javascript; charset=utf-8") for name in ("page.js", "tree.js", "markdown.js")},
}
# The page takes nothing from anywhere else, and nobody may put it into a frame.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}


class PlaygroundRequest(ChatRequest):
    """POST /playground/rounds: the body of a chat with one completion, without tools, which the page could not call."""

    n: Literal[1] | None = None
    tools: None = None
    tool_choice: None = None
    parallel_tool_calls: None = None
    max_completion_tokens: None = None
    logprobs: None = None
    stream: None = None
    stream_options: None = None


def install(app: FastAPI, service: Service, examples: Examples | None) -> None:
    """Add the playground's routes to the server's. `examples` are those that the engine ships."""
    folder = files(__package__) / "page"

    def add(path: str, name: str, media_type: str) -> None:
        content = (folder / name).read_bytes()

        @app.get(path, include_in_schema=False)
        async def page() -> Response:
            return Response(content, media_type=media_type, headers=_HEADERS)

    for path, (name, media_type) in PAGE.items():
        add(path, name, media_type)

    @app.get(f"{PATH}/engine", include_in_schema=False)
    async def engine() -> JSONResponse:
        return JSONResponse(_engine(service, examples))

    @app.post(f"{PATH}/rounds", include_in_schema=False)
    async def rounds(request: Request) -> Response:
        return await _rounds(service, request, await read(request, PlaygroundRequest))


def _engine(service: Service, examples: Examples | None) -> dict[str, Any]:
    """What the page shows and offers."""
    manifest = service.llm.engine.manifest
    return {
        "model": service.model_name,
        "backend": manifest.backend,
        "chat": bool(service.llm.tokenizer.chat_template),
        "methods": [{"name": m.name, "drafts": m.drafts} for m in METHODS.values() if m.serves(manifest.drafter_kind)],
        "max_tree_budget": manifest.limits.max_tree_budget,
        "max_seq_len": manifest.limits.max_seq_len,
        "examples": examples.prompts if examples else [],
        "knows": examples.knows if examples else None,
    }


async def _rounds(service: Service, request: Request, body: PlaygroundRequest) -> Response:
    """A stream of events {text, rounds, figures, finish_reason, busy}, one for each part of the answer. `busy` is the
    warning of a machine that was busy before the answer began."""
    messages = [message.for_template() for message in body.messages]
    if service.llm.tokenizer.chat_template:
        ids = await service.encode_chat(messages, body.chat_template_kwargs)
    else:
        ids = await service.encode(messages[-1]["content"], "messages")
    given = body.sampling()
    params = service.params(given, service.max_seq_len - len(ids), {})
    if params.structured is not None:
        structured = service.chat_format.constraint(ToolUse(), service.chat_format.thinking(ids), params.structured)
        params = replace(params, structured=structured)
    await service.compile(params, given_name(given) or STRUCTURED)
    seen: deque[Round] = deque()  # filled on the engine's thread, emptied here
    request_id = new_id("playground")
    submission = service.submit(request, ids, params, request_id, "messages", on_round=seen.append)
    return stream_response(_events(service, submission, seen), request_id)


async def _events(service: Service, submission: Submission, seen: deque[Round]) -> AsyncIterator[str]:
    busy = busy_warning(os.getloadavg()[0], usable_cores())
    async for part in submission:
        (output,) = part.outputs
        yield event(
            {
                "text": output.text,
                "rounds": [round_record(service.texts, seen.popleft()) for _ in range(len(seen))],
                "figures": figures(part.metrics),
                "finish_reason": finish_reason(output.finish_reason),
                "busy": busy,
            }
        )
