"""POST /v1/chat/completions."""

from __future__ import annotations

import re
import time
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ddtree_trt.errors import UsageError, shown
from ddtree_trt.runtime.chat.tools import ToolUse, read_use
from ddtree_trt.runtime.structured.names import given_name
from ddtree_trt.serve.errors import ApiError
from ddtree_trt.serve.openai.chat_answers import ChatAnswers, Chunks
from ddtree_trt.serve.openai.protocol import ChatRequest, Message
from ddtree_trt.serve.openai.responses import ChatCompletion, ChatCompletionChunk, json_response
from ddtree_trt.serve.openai.streaming import stream
from ddtree_trt.serve.service import Service, check_stream_options, new_id


async def chat(service: Service, request: Request, body: ChatRequest) -> Response:
    service.check_model(body.model)
    with_usage = check_stream_options(body)
    given = body.sampling()
    names = {"logprobs": "top_logprobs", "max_tokens": _apply_token_limit(body, given)}
    if "logprobs" in given and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    if body.logprobs:
        given.setdefault("logprobs", 0)
    use = tool_use(service, body.tools, body.tool_choice, body.parallel_tool_calls)
    check_names(service, body.messages)
    messages = [message.for_template() for message in body.messages]
    ids = await service.encode_chat(messages, body.chat_template_kwargs, use.descriptions or None)
    answers = ChatAnswers(service, use, service.chat_format.thinking(ids))
    params = answers.params(service.params(given, service.max_seq_len - len(ids), names))
    await service.compile(params, given_name(given) or "tools")
    request_id = new_id("chatcmpl")
    submission = service.submit(request, ids, params, request_id, "messages")
    head: dict[str, Any] = {"id": request_id, "created": int(time.time()), "model": service.model_name}
    if body.stream:
        last = ChatCompletionChunk(**head, choices=[]) if with_usage else None
        return stream(service, [submission], Chunks(answers, head), last, request_id)
    output = await submission.result()
    completion = ChatCompletion(
        **head,
        choices=[answers.choice(o) for o in output.outputs],
        usage=service.usage([output]),
        metrics=service.acceptance([output]),
    )
    return json_response(completion)


def tool_use(service: Service, tools: list[dict[str, Any]] | None, choice: Any, parallel: bool | None) -> ToolUse:
    """The tools of a request and how it wants them used. Raises ApiError."""
    try:
        use = read_use(tools, choice, parallel)
        service.chat_format.check_tools(use)
    except UsageError as error:
        path = re.match(r"[\w.\[\]]+", str(error))  # our texts begin with it
        raise ApiError(400, str(error), param=path and path.group(), code="invalid_value") from error
    return use


def check_names(service: Service, messages: list[Message]) -> None:
    """Raises ApiError for the name of someone who says a message where the chat template would drop it. The one of a
    tool says what its call says."""
    for place, message in enumerate(messages):
        if message.name is not None and message.role != "tool" and not service.llm.codec.takes_names:
            param = f"messages.{place}.name"
            message_text = f"Unsupported parameter: '{param}' (the chat template has no place for it)"
            raise ApiError(400, message_text, param=param, code="unsupported_parameter")


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
