"""What clients may send. Everything a model here does not name is refused by name, never dropped.

Types are checked strictly ("5" is not 5); ranges are checked by `SamplingParams`, their only home. `null` means "not
given" everywhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

# Every stop string is compared with the text at every token of every request.
MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_TOKENS = 16, 256, 64

# Names of OpenAI's API that this server knows and does not offer, with the reason it gives.
UNSUPPORTED = {
    "audio": "this server answers in text",
    "best_of": "ask for n completions instead",
    "function_call": "this server does not call functions",
    "functions": "this server does not call functions",
    "modalities": "this server answers in text",
    "moderation": "this server does not moderate",
    "parallel_tool_calls": "this server does not call tools",
    "prediction": "the drafter predicts by itself",
    "prompt_cache_options": "prompts that begin alike share their cache without being told",
    "prompt_cache_retention": "prompts that begin alike share their cache without being told",
    "reasoning_effort": "the chat template is fixed by the drafter's training",
    "service_tier": "all requests are served alike",
    "suffix": "this server does not fill in the middle",
    "tool_choice": "this server does not call tools",
    "tools": "this server does not call tools",
    "verbosity": "ask for it in the prompt",
    "web_search_options": "this server does not search",
    "messages.name": "chat templates have no place for it",
    "messages.tool_calls": "this server does not call tools",
}


def _not_text(value: str) -> str | None:
    """What is wrong with a text that JSON let through."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is half of a surrogate pair"
    return None


def _text(value: Any) -> Any:
    if isinstance(value, str) and (problem := _not_text(value)):
        raise ValueError(f"the text is not valid Unicode: {problem}")
    return value


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str | int) and not isinstance(value, bool) else value


def _token_keys(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if wrong := [k for k in value if not (isinstance(k, str) and k.isascii() and k.isdecimal() and len(k) < 10)]:
        raise ValueError(f"{wrong[0]!r} is not a token id")
    return {int(k): v for k, v in value.items()}


def _budget(value: Any) -> Any:
    if value is not None and value != "auto" and type(value) is not int:
        raise ValueError("must be an integer or 'auto'")
    return value


def _plain_text_only(value: Any) -> Any:
    if value is not None and value != {"type": "text"}:
        raise ValueError("only {'type': 'text'} is supported; this server does not constrain the output")
    return value


def _content(value: Any) -> Any:
    """A message's content as one text: given as text, or as parts that are all texts."""
    if not isinstance(value, list):
        return _text(value)
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            found = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"a part must be {{'type': 'text', 'text': ...}}, not {found!r}; this server takes text")
        if extra := sorted(part.keys() - {"type", "text"}):
            raise ValueError(f"a text part has no {extra[0]!r}")
    return _text("".join(part["text"] for part in value))


def _prompts(value: Any) -> Any:
    """One prompt or several, each text or token ids, as a list of prompts."""
    prompts = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    for prompt in prompts:
        if isinstance(prompt, str):
            _text(prompt)
        elif not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise ValueError("must be a text, a list of token ids, or a list of either")
    if not all(isinstance(prompt, type(prompts[0])) for prompt in prompts):
        raise ValueError("must be all texts or all lists of token ids")
    return prompts


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    include_usage: bool | None = None


class _GenerationRequest(_Strict):
    """What both endpoints take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_token_keys)] = None
    seed: int | None = None
    stop: Annotated[
        list[Annotated[str, Field(max_length=MAX_STOP_CHARACTERS), BeforeValidator(_text)]] | None,
        Field(max_length=MAX_STOPS),
        BeforeValidator(_one_or_more),
    ] = None

    # Beyond OpenAI's API, under vLLM's names.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int] | None, Field(max_length=MAX_STOP_TOKENS), BeforeValidator(_one_or_more)] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    # Ours.
    method: str | None = None
    tree_budget: Annotated[Any, BeforeValidator(_budget)] = None

    # A client's own bookkeeping; it changes no answer and is ignored.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Literal[False] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_unsupported_nulls(cls, data: Any) -> Any:
        return _without_nulls(data, {n for n in UNSUPPORTED if n not in cls.model_fields})


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls_of_answers(cls, data: Any) -> Any:
        """A client may send our own answer back, with the nulls its library puts in it."""
        return _without_nulls(data, {"refusal", "annotations", "audio", "function_call", "tool_calls", "name"})


def _without_nulls(data: Any, names: set[str]) -> Any:
    if not isinstance(data, dict):
        return data
    return {k: v for k, v in data.items() if not (v is None and k in names)}


class ChatRequest(_GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Annotated[dict[str, Any] | None, BeforeValidator(_plain_text_only)] = None


class CompletionRequest(_GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], Field(min_length=1), BeforeValidator(_prompts)]
    echo: bool | None = None
    logprobs: int | None = None
