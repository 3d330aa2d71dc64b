"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ddtree_trt.errors import shown
from ddtree_trt.runtime.decoding.sampling import TokenLogprob
from ddtree_trt.runtime.outputs import CompletionOutput, RequestOutput
from ddtree_trt.serve.errors import ApiError
from ddtree_trt.serve.openai.protocol import ChatRequest
from ddtree_trt.serve.openai.responses import (
    Answer,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Delta,
    TokenLogprobInfo,
    TopLogprob,
    json_response,
)
from ddtree_trt.serve.openai.streaming import stream
from ddtree_trt.serve.openai.tokens import TokenTexts, json_logprob
from ddtree_trt.serve.service import Service, check_stream_options, finish_reason, new_id


async def chat(service: Service, request: Request, body: ChatRequest) -> Response:
    service.check_model(body.model)
    with_usage = check_stream_options(body)
    given = body.sampling()
    names = {"logprobs": "top_logprobs", "max_tokens": _apply_token_limit(body, given)}
    if "logprobs" in given and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    if body.logprobs:
        given.setdefault("logprobs", 0)
    # "developer" is OpenAI's newer name of the role that chat templates call "system".
    messages = [{"role": "system" if m.role == "developer" else m.role, "content": m.content} for m in body.messages]
    ids = await service.encode_chat(messages, body.chat_template_kwargs)
    params = service.params(given, service.max_seq_len - len(ids), names)
    request_id = new_id("chatcmpl")
    submission = service.submit(request, ids, params, request_id, "messages")
    head: dict[str, Any] = {"id": request_id, "created": int(time.time()), "model": service.model_name}
    if body.stream:
        last = ChatCompletionChunk(**head, choices=[]) if with_usage else None
        return stream(service, [submission], _Chunks(service.texts, head), last, request_id)
    output = await submission.result()
    completion = ChatCompletion(
        **head,
        choices=[_choice(service.texts, o) for o in output.outputs],
        usage=service.usage([output]),
        metrics=service.acceptance([output]),
    )
    return json_response(completion)


def _apply_token_limit(body: ChatRequest, given: dict[str, Any]) -> str:
    """Set `max_tokens` of `given` from either field; returns the name of the field that was given."""
    newer, older = body.max_completion_tokens, given.get("max_tokens")
    if newer is None:
        return "max_tokens"
    if older not in (None, newer):
        both = f"max_tokens {shown(older)} and max_completion_tokens {shown(newer)}"
        raise ApiError(400, f"{both} differ; give one", param="max_tokens", code="invalid_value")
    given["max_tokens"] = newer
    return "max_completion_tokens"


def _choice(texts: TokenTexts, output: CompletionOutput) -> ChatChoice:
    return ChatChoice(
        index=output.index,
        message=ChatMessage(content=output.text),
        logprobs=_logprobs(texts, output),
        finish_reason=finish_reason(output.finish_reason),
    )


class _Chunks:
    """Converts parts of a stream to chunks; each choice's first chunk has the role."""

    def __init__(self, texts: TokenTexts, head: dict[str, Any]) -> None:
        self._texts = texts
        self._head = head
        self._begun: set[int] = set()

    def __call__(self, place: int, part: RequestOutput, output: CompletionOutput) -> list[Answer]:
        chunks: list[Answer] = []
        if output.index not in self._begun:
            self._begun.add(output.index)
            chunks.append(self._chunk(output.index, Delta(role="assistant", content="")))
        logprobs = _logprobs(self._texts, output)
        if output.text or output.finish_reason is not None or (logprobs and logprobs.content):
            delta = Delta(content=output.text) if output.text else Delta()
            chunks.append(self._chunk(output.index, delta, logprobs, finish_reason(output.finish_reason)))
        return chunks

    def _chunk(
        self, index: int, delta: Delta, logprobs: ChatLogprobs | None = None, finish_reason: Any = None
    ) -> ChatCompletionChunk:
        choice = ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return ChatCompletionChunk(**self._head, choices=[choice])


def _logprobs(texts: TokenTexts, output: CompletionOutput) -> ChatLogprobs | None:
    if output.logprobs is None:
        return None
    return ChatLogprobs(content=[_token(texts, t) for t in output.logprobs])


def _token(texts: TokenTexts, token: TokenLogprob) -> TokenLogprobInfo:
    top = [_top(texts, token_id, logprob) for token_id, logprob in token.top]
    own = _top(texts, token.token_id, token.logprob)
    return TokenLogprobInfo(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top)


def _top(texts: TokenTexts, token_id: int, logprob: float) -> TopLogprob:
    text, raw = texts.of(token_id)
    return TopLogprob(token=text, logprob=json_logprob(logprob), bytes=None if raw is None else list(raw))
