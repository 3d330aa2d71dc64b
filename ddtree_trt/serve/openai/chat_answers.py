"""Answers of chats: messages of whole outputs, and deltas of outputs that arrive in parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.chat.reader import Content, Event, MessageReader, Reasoning, Thinking, read_message
from ddtree_trt.runtime.chat.tools import ToolUse
from ddtree_trt.runtime.decoding.sampling import TokenLogprob
from ddtree_trt.runtime.outputs import CompletionOutput, RequestOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.serve.errors import ApiError
from ddtree_trt.serve.openai.responses import (
    Answer,
    CallDelta,
    ChatChoice,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Delta,
    Function,
    TokenLogprobInfo,
    ToolCall,
    TopLogprob,
)
from ddtree_trt.serve.openai.tokens import TokenTexts, json_logprob
from ddtree_trt.serve.service import Service, finish_reason


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
            raise ApiError(400, str(error), param="tools", code="invalid_value") from error
        plain = not self._use.tools and self._thinking == "never"
        return replace(given, structured=structured, keep_special_tokens=() if plain else self._format.marks)

    def choice(self, output: CompletionOutput) -> ChatChoice:
        tools = self._format.tool_format(self._use)
        message = read_message(output.text, self._thinking, tools, parallel=self._use.parallel)
        calls = [
            ToolCall(id=call.id, function=Function(name=call.name, arguments=call.arguments))
            for call in message.tool_calls
        ]
        return ChatChoice(
            index=output.index,
            message=ChatMessage(
                content=message.content, reasoning_content=message.reasoning_content, tool_calls=calls or None
            ),
            logprobs=self.logprobs(output),
            finish_reason=_finish_reason(output, len(calls)),
        )

    def reader(self) -> MessageReader | None:
        """A reader of one output that arrives in parts; None where all of it is content."""
        return self._format.reader(self._thinking, self._use)

    def logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if output.logprobs is None:
            return None
        return ChatLogprobs(content=[_token(self._texts, t) for t in output.logprobs])


class Chunks:
    """Converts parts of a stream to chunks; each choice's first chunk has the role."""

    def __init__(self, answers: ChatAnswers, head: dict[str, Any]) -> None:
        self._answers = answers
        self._head = head
        self._readers: dict[int, MessageReader | None] = {}

    def __call__(self, place: int, part: RequestOutput, output: CompletionOutput) -> list[Answer]:
        chunks: list[Answer] = []
        if output.index not in self._readers:
            self._readers[output.index] = self._answers.reader()
            chunks.append(self._chunk(output.index, Delta(role="assistant", content="")))
        reader = self._readers[output.index]
        deltas = [_delta(event) for event in _events(reader, output)]
        logprobs = self._answers.logprobs(output)
        ends = output.finish_reason is not None
        if not deltas and (ends or (logprobs and logprobs.content)):
            deltas = [Delta()]
        for delta in deltas:
            last = delta is deltas[-1]
            reason = _finish_reason(output, reader.calls if reader else 0) if ends and last else None
            chunks.append(self._chunk(output.index, delta, logprobs, reason))
            if logprobs is not None:  # those of the part are sent with its first chunk
                logprobs = ChatLogprobs(content=[])
        return chunks

    def _chunk(
        self, index: int, delta: Delta, logprobs: ChatLogprobs | None = None, finish_reason: Any = None
    ) -> ChatCompletionChunk:
        choice = ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return ChatCompletionChunk(**self._head, choices=[choice])


def _events(reader: MessageReader | None, output: CompletionOutput) -> list[Event]:
    """What a part of an output says."""
    if reader is None:
        return [Content(output.text)] if output.text else []
    return reader.push(output.text) + (reader.end() if output.finish_reason is not None else [])


def _delta(event: Event) -> Delta:
    if isinstance(event, Reasoning):
        return Delta(reasoning_content=event.text)
    if isinstance(event, Content):
        return Delta(content=event.text)
    function = Function(name=event.name, arguments=event.arguments)
    return Delta(tool_calls=[CallDelta(index=event.index, id=event.id, type="function", function=function)])


def _finish_reason(output: CompletionOutput, calls: int) -> Any:
    """The reason in OpenAI's terms; an answer that stops behind calls has stopped for their results."""
    reason = finish_reason(output.finish_reason)
    return "tool_calls" if calls and reason == "stop" else reason


def _token(texts: TokenTexts, token: TokenLogprob) -> TokenLogprobInfo:
    top = [_top(texts, token_id, logprob) for token_id, logprob in token.top]
    own = _top(texts, token.token_id, token.logprob)
    return TokenLogprobInfo(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top)


def _top(texts: TokenTexts, token_id: int, logprob: float) -> TopLogprob:
    text, raw = texts.of(token_id)
    return TopLogprob(token=text, logprob=json_logprob(logprob), bytes=None if raw is None else list(raw))
