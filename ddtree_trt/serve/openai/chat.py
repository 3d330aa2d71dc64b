"""POST /v1/chat/completions: messages of whole outputs, and deltas of outputs that arrive in parts."""

import re
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.chat.reader import Event, MessageReader, Text, Thinking, read_message
from ddtree_trt.runtime.chat.tools import ToolUse, read_use
from ddtree_trt.runtime.outputs import CompletionOutput, RequestOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.serve.errors import invalid
from ddtree_trt.serve.openai.answers import Answer, finish_reason, json_logprob, new_id, respond
from ddtree_trt.serve.openai.protocol import ChatRequest
from ddtree_trt.serve.service import Service


async def chat(service: Service, request: Request, body: ChatRequest) -> Response:
    service.check(body)
    given = body.sampling()
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:  # OpenAI's newer name, over the older one
        given["max_tokens"], names["max_tokens"] = body.max_completion_tokens, "max_completion_tokens"
    if "logprobs" in given and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if body.logprobs:
        given.setdefault("logprobs", 0)
    use = tool_use(service, body.tools, body.tool_choice, body.parallel_tool_calls)
    text = await service.render(body.messages, body.chat_template_kwargs, use.descriptions or None)
    ids = await service.encode(text, "messages")
    answers = ChatAnswers(service, use, service.chat_format.thinking(ids))
    params = answers.params(service.params(given, service.max_seq_len - len(ids), names))
    await service.compile(params, given, use)
    request_id = new_id("chatcmpl")
    submissions = [service.submit(request, ids, params, request_id, "messages", names=names)]
    kinds = ("chat.completion", "chat.completion.chunk")
    return await respond(service, body, request_id, submissions, kinds, answers.whole, answers.parts)


def tool_use(service: Service, tools: list[dict[str, Any]] | None, choice: Any, parallel: bool | None) -> ToolUse:
    """The tools of a request and how it wants them used. Raises ApiError."""
    try:
        use = read_use(tools, choice, parallel)
        service.chat_format.check_tools(use)
    except UsageError as error:
        path = re.match(r"[\w.\[\]]+", str(error))  # our texts begin with it
        raise invalid(str(error), path and path.group()) from error
    return use


class ChatAnswers:
    """Reads the outputs of one request: what is reasoning, content and calls of its tools."""

    def __init__(self, service: Service, use: ToolUse, thinking: Thinking) -> None:
        self._format = service.chat_format
        self._texts = service.texts
        self._use = use
        self._thinking = thinking
        self._readers: dict[int, MessageReader | None] = {}  # of choices that arrive in parts; None: all is content

    def params(self, given: SamplingParams) -> SamplingParams:
        """The request's parameters with what its tools and marks need. Raises ApiError for a second constraint."""
        try:
            structured = self._format.constraint(self._use, self._thinking, given.structured)
        except UsageError as error:
            raise invalid(str(error), "tools") from error
        plain = not self._use.tools and self._thinking == "never"
        return replace(given, structured=structured, keep_special_tokens=() if plain else self._format.marks)

    def whole(self, place: int, whole: RequestOutput, output: CompletionOutput) -> list[Answer]:
        tools = self._format.tool_format(self._use)
        read = read_message(output.text, self._thinking, tools, parallel=self._use.parallel)
        message = {**read.to_dict(), "refusal": None}
        logprobs, reason = self._logprobs(output), _finish_reason(output, len(read.tool_calls))
        return [{"index": output.index, "message": message, "logprobs": logprobs, "finish_reason": reason}]

    def parts(self, place: int, part: RequestOutput, output: CompletionOutput) -> list[Answer]:
        """The chunks of a part; each choice's first chunk has the role."""
        choices: list[Answer] = []

        def add(delta: Answer, logprobs: Answer | None = None, reason: str | None = None) -> None:
            choices.append({"index": output.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason})

        if output.index not in self._readers:
            self._readers[output.index] = self._format.reader(self._thinking, self._use)
            add({"role": "assistant", "content": ""})
        reader, ends = self._readers[output.index], output.finish_reason is not None
        events: list[Event] = [Text("content", output.text)] if output.text else []
        if reader is not None:
            events = reader.push(output.text) + (reader.end() if ends else [])
        deltas, logprobs = [_delta(event) for event in events], self._logprobs(output)
        if not deltas and (ends or (logprobs and logprobs["content"])):
            deltas = [{}]
        for delta in deltas:
            add(delta, logprobs)
            if logprobs is not None:  # those of the part are sent with its first chunk
                logprobs = {**logprobs, "content": []}
        if ends:
            choices[-1]["finish_reason"] = _finish_reason(output, reader.calls if reader else 0)
        return choices

    def _logprobs(self, output: CompletionOutput) -> Answer | None:
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


def _delta(event: Event) -> Answer:
    if isinstance(event, Text):
        return {event.field: event.text}
    return {"tool_calls": [{"index": event.index, **event.to_dict()}]}


def _finish_reason(output: CompletionOutput, calls: int) -> str | None:
    """The reason in OpenAI's terms; an answer that stops behind calls has stopped for their results."""
    reason = finish_reason(output.finish_reason)
    return "tool_calls" if calls and reason == "stop" else reason
