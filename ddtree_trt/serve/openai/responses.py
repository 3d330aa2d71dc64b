"""Bodies of the server's answers: OpenAI's shapes, with this server's figures in a further field `metrics`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, model_serializer
from starlette.responses import Response

from ddtree_trt.runtime.stats import RequestMetrics


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class UsageInfo(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AcceptanceMetrics(BaseModel):
    """Acceptance of one request's drafts, and its times in seconds. A round commits at least one token."""

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

    @classmethod
    def of(cls, metrics: RequestMetrics) -> AcceptanceMetrics:
        return cls(**{name: getattr(metrics, name) for name in cls.model_fields})


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


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None  # None in a stream's earlier parts


class Delta(BaseModel):
    """The new part of a message. Only fields that were set are sent."""

    role: Literal["assistant"] = "assistant"
    content: str = ""

    @model_serializer
    def _only_what_was_set(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


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
