"""Routes of the playground: the page's files, what it must know of the engine, and rounds as they happen, as JSON."""

import math
import os
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.resources import files
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ddtree_trt.artifact.examples import Examples
from ddtree_trt.device.cpu import busy_warning, usable_cores
from ddtree_trt.runtime.async_llm import Submission
from ddtree_trt.runtime.chat.tools import ToolUse
from ddtree_trt.runtime.decoding.loop import Round
from ddtree_trt.runtime.decoding.methods import METHODS
from ddtree_trt.serve.openai.answers import event, finish_reason, new_id, stream_response
from ddtree_trt.serve.openai.protocol import ChatRequest, read
from ddtree_trt.serve.openai.tokens import TokenTexts
from ddtree_trt.serve.service import Service

PATH = "/playground"
PAGE = {
    **dict.fromkeys(("/", PATH), ("page.html", "text/html; charset=utf-8")),
    f"{PATH}/page.css": ("page.css", "text/css; charset=utf-8"),
    **{f"{PATH}/{name}": (name, "text/javascript; charset=utf-8") for name in ("page.js", "tree.js", "markdown.js")},
}
# The page takes nothing from anywhere else, and nobody may put it into a frame.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
# Of a request so far, in seconds and tokens per second.
_FIGURES = ("output_tokens", "rounds", "mean_acceptance_length", "decode_tokens_per_s", "stage_s")
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


def routes(service: Service, examples: Examples | None) -> list[Route]:
    """The playground's routes. `examples` are those that the engine ships."""
    folder = files(__package__) / "page"

    def page(path: str, name: str, media_type: str) -> Route:
        content = (folder / name).read_bytes()

        async def page(_: Request) -> Response:
            return Response(content, media_type=media_type, headers=_HEADERS)

        return Route(path, page)

    async def engine(_: Request) -> Response:
        manifest = service.llm.engine.manifest
        able = [m for m in METHODS.values() if m.serves(manifest.drafter_kind)]
        return JSONResponse(
            {
                "model": service.model_name,
                "backend": manifest.backend,
                "chat": bool(service.llm.tokenizer.chat_template),
                "methods": [{"name": method.name, "drafts": method.drafts} for method in able],
                "max_tree_budget": manifest.limits.max_tree_budget,
                "max_seq_len": manifest.limits.max_seq_len,
                "examples": examples.prompts if examples else [],
                "knows": examples.knows if examples else None,
            }
        )

    async def rounds(request: Request) -> Response:
        return await _rounds(service, request, await read(request, PlaygroundRequest))

    pages = [page(path, *row) for path, row in PAGE.items()]
    return [*pages, Route(f"{PATH}/engine", engine), Route(f"{PATH}/rounds", rounds, methods=["POST"])]


async def _rounds(service: Service, request: Request, body: PlaygroundRequest) -> Response:
    """A stream of events {text, rounds, figures, finish_reason, busy}, one for each part of the answer."""
    text = body.messages[-1].content or ""
    if service.llm.tokenizer.chat_template:
        text = await service.render(body.messages, body.chat_template_kwargs)
    ids = await service.encode(text, "messages")
    given = body.sampling()
    params = service.params(given, service.max_seq_len - len(ids), {})
    if params.structured is not None:
        structured = service.chat_format.constraint(ToolUse(), service.chat_format.thinking(ids), params.structured)
        params = replace(params, structured=structured)
    await service.compile(params, given)
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
                "rounds": [_round(service.texts, seen.popleft()) for _ in range(len(seen))],
                "figures": {name: getattr(part.metrics, name) for name in _FIGURES},
                "finish_reason": finish_reason(output.finish_reason),
                "busy": busy,
            }
        )


def _round(texts: TokenTexts, round_: Round) -> dict[str, Any]:
    """A round as {root, nodes, path, emitted, decision}; seconds.

    `root` is the bonus token's text. A node is [text, parent, probability]: parent 0 is the root, i > 0 the node at
    place i − 1; the probability is the drafter's, of the whole prefix. `path` are the accepted nodes, counted like
    parents; `emitted` the texts that the round added to the output; `decision` why an automatic budget chose the size.
    """
    tree, why, path = round_.tree, round_.decision, [node for node in round_.path.tolist() if node]
    tokens, parents, weights = tree.token_ids.tolist(), tree.parents.tolist(), tree.log_weights.tolist()

    def text(token: int) -> str:
        return texts.of(token)[0]

    return {
        "root": text(round_.root_token),
        "nodes": [
            [text(token), parent, round(math.exp(weight), 4)]
            for token, parent, weight in zip(tokens, parents[1:], weights, strict=True)
        ],
        "path": path,
        "emitted": [text(token) for token in [*(tokens[node - 1] for node in path), round_.next_token]],
        "decision": why and {**why._asdict(), "expected_gain": why.expected_gain},
    }
