"""POST /v1/chat/completions: messages of whole outputs, and deltas of outputs that arrive in parts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ddtree_trt.errors import UsageError, shown
from ddtree_trt.runtime.chat.reader import Content, Event, MessageReader, Reasoning, Thinking, read_message
from ddtree_trt.runtime.chat.tools import ToolUse, read_use
from ddtree_trt.runtime.outputs import CompletionOutput, RequestOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.structured.names import given_name
from ddtree_trt.serve.errors import ApiError, invalid
from ddtree_trt.serve.openai.answers import Answer, finish_reason, json_logprob, new_id, respond
from ddtree_trt.serve.openai.protocol import ChatRequest, Message
from ddtree_trt.serve.service import Service


async def chat(service: Service, request: Request, body: ChatRequest) -> Response:
    service.check(body)
    given = body.sampling()
    names = {"logprobs": "top_logprobs", "max_tokens": _apply_token_limit(body, given)}
    if "logprobs" in given and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if body.logprobs:
        given.setdefault("logprobs", 0)
    use = tool_use(service, body.tools, body.tool_choice, body.parallel_tool_calls)
    check_names(service, body.messages)
    messages = [message.for_template() for message in body.messages]
    text = await service.render(messages, body.chat_template_kwargs, use.descriptions or None)
    ids = await service.encode(text, "messages")
    answers = ChatAnswers(service, use, service.chat_format.thinking(ids))
    params = answers.params(service.params(given, service.max_seq_len - len(ids), names))
    await service.compile(params, given_name(given) or "tools")
    request_id = new_id("chatcmpl")
    submissions = [service.submit(request, ids, params, request_id, "messages")]
    kinds = ("chat.completion", "chat.completion.chunk")
    return await respond(service, body, request_id, submissions, kinds, answers.whole, Chunks(answers))


def tool_use(service: Service, tools: list[dict[str, Any]] | None, choice: Any, parallel: bool | None) -> ToolUse:
    """The tools of a request and how it wants them used. Raises ApiError."""
    try:
        use = read_use(tools, choice, parallel)
        service.chat_format.check_tools(use)
    except UsageError as error:
        path = re.match(r"[\w.\[\]]+", str(error))  # our texts begin with it
        raise invalid(str(error), path and path.group()) from error
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
        raise invalid(f"{both} differ; give one", "max_tokens")
    given["max_tokens"] = newer
    return "max_completion_tokens"


class ChatAnswers:
    """Reads the outputs of one request: what is reasoning, content and calls of its tools."""

    def __init__(self, service: Service, use: ToolUse, thinking: Thinking) -> None:
        self._format = service.chat_format
        self._texts = service.texts
        self._use = use
        self._thinking = thinking

    def params(self, given: SamplingParams) -> SamplingParams:
        """The request's parameters with what its answers need: the tokens that mark their parts, and the constraint
        that its tools ask for. Raises ApiError where there is another one already."""
        try:
            structured = self._format.constraint(self._use, self._thinking, given.structured)
        except UsageError as error:
            raise invalid(str(error), "tools") from error
        plain = not self._use.tools and self._thinking == "never"
        return replace(given, structured=structured, keep_special_tokens=() if plain else self._format.marks)

    def whole(self, place: int, whole: RequestOutput, output: CompletionOutput) -> list[Answer]:
        tools = self._format.tool_format(self._use)
        read = read_message(output.text, self._thinking, tools, parallel=self._use.parallel)
        message: Answer = {"role": "assistant", "content": read.content, "refusal": None}
        if read.reasoning_content is not None:
            message["reasoning_content"] = read.reasoning_content
        if read.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in read.tool_calls]
        reason = _finish_reason(output, len(read.tool_calls))
        return [{"index": output.index, "message": message, "logprobs": self.logprobs(output), "finish_reason": reason}]

    def reader(self) -> MessageReader | None:
        """A reader of one output that arrives in parts; None where all of it is content."""
        return self._format.reader(self._thinking, self._use)

    def logprobs(self, output: CompletionOutput) -> Answer | None:
        if output.logprobs is None:
            return None
        tokens = [
            {**self._token(t.token_id, t.logprob), "top_logprobs": [self._token(*top) for top in t.top]}
            for t in output.logprobs
        ]
        return {"content": tokens, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Answer:
        text, raw = self._texts.of(token_id)
        return {"token": text, "logprob": json_logprob(logprob), "bytes": None if raw is None else list(raw)}


class Chunks:
    """Converts parts of a stream to chunks; each choice's first chunk has the role."""

    def __init__(self, answers: ChatAnswers) -> None:
        self._answers = answers
        self._readers: dict[int, MessageReader | None] = {}

    def __call__(self, place: int, part: RequestOutput, output: CompletionOutput) -> list[Answer]:
        choices: list[Answer] = []

        def add(delta: Answer, logprobs: Answer | None = None, reason: str | None = None) -> None:
            choices.append({"index": output.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason})

        if output.index not in self._readers:
            self._readers[output.index] = self._answers.reader()
            add({"role": "assistant", "content": ""})
        reader = self._readers[output.index]
        deltas = [_delta(event) for event in _events(reader, output)]
        logprobs = self._answers.logprobs(output)
        ends = output.finish_reason is not None
        if not deltas and (ends or (logprobs and logprobs["content"])):
            deltas = [{}]
        for delta in deltas:
            add(delta, logprobs)
            if logprobs is not None:  # those of the part are sent with its first chunk
                logprobs = {**logprobs, "content": []}
        if ends:
            choices[-1]["finish_reason"] = _finish_reason(output, reader.calls if reader else 0)
        return choices


def _events(reader: MessageReader | None, output: CompletionOutput) -> list[Event]:
    """What a part of an output says."""
    if reader is None:
        return [Content(output.text)] if output.text else []
    return reader.push(output.text) + (reader.end() if output.finish_reason is not None else [])


def _delta(event: Event) -> Answer:
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, Content):
        return {"content": event.text}
    return {"tool_calls": [{"index": event.index, **event.to_dict()}]}


def _finish_reason(output: CompletionOutput, calls: int) -> str | None:
    """The reason in OpenAI's terms; an answer that stops behind calls has stopped for their results."""
    reason = finish_reason(output.finish_reason)
    return "tool_calls" if calls and reason == "stop" else reason
