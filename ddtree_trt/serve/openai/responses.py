"""Bodies of the server's answers: OpenAI's shapes, with this server's figures in a further field `metrics`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer
from starlette.responses import Response

from ddtree_trt.runtime.stats import RequestMetrics


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class UsageInfo(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class SpeculativeDecoding(BaseModel):
    """Acceptance of one sequence's drafts in vLLM's terms: a step is a round that verified draft tokens, and bonus
    tokens count in the mean length only."""

    mean_acceptance_length: float  # 1 where nothing was drafted
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # [num_spec_tokens + 1]: item j counts the steps that accepted j draft tokens
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # the most draft tokens a step can accept

    @classmethod
    def of(cls, metrics: RequestMetrics, longest_draft: int) -> SpeculativeDecoding:
        """The figures of a sequence whose engine drafts up to `longest_draft` positions ahead."""
        histogram, steps = metrics.accepted_histogram(longest_draft), metrics.drafting_rounds
        return cls(
            mean_acceptance_length=1 + metrics.accepted_tokens / steps if steps else 1.0,
            draft_acceptance_rate=metrics.acceptance_rate,
            acceptance_histogram=histogram,
            num_spec_steps=steps,
            num_accepted_draft_tokens=metrics.accepted_tokens,
            num_draft_tokens=metrics.drafted_tokens,
            num_spec_tokens=len(histogram) - 1,
        )


class AcceptanceMetrics(BaseModel):
    """Acceptance of one request's drafts, and its times in seconds. A round commits at least one token.

    The fields behind `why_host` are those of vLLM's object `metrics`, in milliseconds where they say so. They describe
    one sequence, and are None for a request of several, as vLLM has it.
    """

    rounds: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float
    mean_acceptance_length: float
    acceptance_histogram: dict[int, int]
    acceptance_by_depth: list[float]
    mean_budget: float
    time_to_first_token_s: float | None
    time_per_output_token_s: float | None
    stage_s: dict[str, float]
    on_device: bool
    why_host: str | None
    speculative_decoding: SpeculativeDecoding | None = None
    time_to_first_token_ms: float | None = None  # from getting a slot
    generation_time_ms: float | None = None  # from the first token to the last
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None  # from getting a slot to the last token

    @classmethod
    def of(cls, metrics: RequestMetrics, longest_draft: int) -> AcceptanceMetrics:
        """The figures of a request whose engine drafts up to `longest_draft` positions ahead."""
        own = {name: getattr(metrics, name) for name, field in cls.model_fields.items() if field.is_required()}
        if metrics.sequences > 1:
            return cls(**own)
        seconds = metrics.inference_time_s
        return cls(
            **own,
            speculative_decoding=SpeculativeDecoding.of(metrics, longest_draft),
            time_to_first_token_ms=_milliseconds(metrics.prefill_time_s),
            generation_time_ms=_milliseconds(metrics.decode_time_s),
            queue_time_ms=_milliseconds(metrics.queue_time_s),
            mean_itl_ms=_milliseconds(metrics.time_per_output_token_s),
            tokens_per_second=metrics.output_tokens / seconds if seconds else None,
        )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobInfo(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprobInfo]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _OnlyWhatWasSet(BaseModel):
    """Only fields that were set are sent."""

    @model_serializer(mode="wrap")
    def _set_fields(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if name in self.model_fields_set}


class Function(_OnlyWhatWasSet):
    name: str = ""
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: Function


class CallDelta(_OnlyWhatWasSet):
    """The new part of a call: its id, type and name, or the next part of its arguments."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None  # sent where there is some, and so are calls
    tool_calls: list[ToolCall] | None = None

    @model_serializer(mode="wrap")
    def _without_empty_parts(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        parts = ("reasoning_content", "tool_calls")
        return {name: value for name, value in dump(self).items() if value is not None or name not in parts}


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None  # None in a stream's earlier parts


class Delta(_OnlyWhatWasSet):
    """The new part of a message."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[CallDelta] = []


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class Answer(BaseModel):
    id: str
    object: str
    created: int  # Unix seconds
    model: str
    choices: list[Any]
    usage: UsageInfo | None = None  # in streams that ask for it: null until the last part; not sent in others
    metrics: AcceptanceMetrics | None = None

    def to_json(self) -> str:
        return self.model_dump_json(exclude={"usage", "metrics"} - self.model_fields_set)


class ChatCompletion(Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatCompletionChunk(Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]


class Completion(Answer):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ddtree-trt"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def json_response(answer: Answer) -> Response:
    return Response(answer.to_json(), media_type="application/json", headers={"X-Request-Id": answer.id})


def event(data: str) -> str:
    """One server-sent event."""
    return f"data: {data}\n\n"


DONE = event("[DONE]")
