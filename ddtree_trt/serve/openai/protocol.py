"""Models of request bodies, and reading them: up to the first error, a large body in another thread than the event
loop's. A field that a model does not have is refused, never dropped.

Their sampling parameters are the fields of `SamplingParams`, with their types and ranges. `null` means "not given"
everywhere.
"""

from __future__ import annotations

import asyncio
import codecs
import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError, from_json
from starlette.requests import Request

from ddtree_trt.errors import shown
from ddtree_trt.reading import problem_of
from ddtree_trt.runtime.params import PARAMETERS, Endpoint
from ddtree_trt.runtime.structured.record import ALIASES
from ddtree_trt.serve.errors import ApiError, cut, invalid

UNKNOWN = "unknown_parameter"  # pydantic's error type of a field that a model does not have; its context has the name


def _content(value: Any) -> Any:
    """A message's content as one text: given as text, or as parts that are all texts."""
    if not isinstance(value, list):
        return value
    for part in value:
        match part:
            case {"type": "text", "text": str(), **rest} if not rest:
                pass
            case _:
                raise ValueError(
                    f"a part must be {{'type': 'text', 'text': ...}}, not {shown(part)}; only texts are taken"
                )
    return "".join(part["text"] for part in value)


def _prompts(value: Any) -> Any:
    """One prompt or several, each text or token ids, as a list of prompts."""
    prompts = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    texts = all(isinstance(prompt, str) for prompt in prompts)
    if not texts and not all(isinstance(p, list) and all(type(token) is int for token in p) for p in prompts):
        raise ValueError("must be a text, a list of token ids, or a list of texts or of such lists")
    return prompts


def _at_most(count: int, characters: int = 256) -> BeforeValidator:
    """Limits a list before its entries are checked. Every stop string is compared with the text at every token."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > count:
            raise ValueError(f"at most {count} entries, not {len(value)}")
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(text, str) and len(text) > characters for text in texts):
            raise ValueError(f"at most {characters} characters in a text")
        return value

    return BeforeValidator(check)


class _Strict(BaseModel):
    """Checks types strictly, and reports the first unknown field only: pydantic reports them all, which takes seconds
    for a body of many. One that is null is as good as not given: clients' libraries add such."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        unknown = next((name for name, v in data.items() if v is not None and name not in cls.model_fields), None)
        if unknown is not None:
            raise PydanticCustomError(UNKNOWN, "unknown", {"name": unknown})
        return {name: value for name, value in data.items() if name in cls.model_fields}


class StreamOptions(_Strict):
    include_usage: bool | None = None


class _GenerationRequest(_Strict):
    """Fields of both endpoints, without sampling parameters."""

    endpoint: ClassVar[Endpoint]

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # The client's bookkeeping, which changes no answer.
    user: str | None = None
    metadata: Annotated[dict[str, str] | None, _at_most(16)] = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None  # there is one

    # Constraints on the output; see runtime/structured/record.py.
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters given, as `SamplingParams.from_mapping` takes them."""
        fields = {name: row.http_name(self.endpoint) for name, row in PARAMETERS.items()}
        fields |= dict(zip(ALIASES, ALIASES, strict=True))
        given = {name: getattr(self, field) for name, field in fields.items() if field is not None}
        return {name: value for name, value in given.items() if value is not None}


_LIMITS = {"stop": _at_most(16), "stop_token_ids": _at_most(64), "logit_bias": _at_most(300)}
_Body = TypeVar("_Body", bound=_GenerationRequest)


def _with_sampling(body: type[_Body]) -> type[_Body]:
    """The model with a field for each sampling parameter that its endpoint takes, as `SamplingParams` has it."""
    fields: dict[str, Any] = {
        name: (Annotated[row.annotation, _LIMITS.get(row.name)] | None, None)
        for row in PARAMETERS.values()
        if (name := row.http_name(body.endpoint)) is not None
    }
    return create_model(body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **fields)


class Message(_Strict):
    """A message of a chat. Clients may send our answers back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_content)] = None  # which is needed where there is no other part
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None  # `template_messages` reads them
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        given = self.model_dump(exclude_none=True)
        # "developer" is OpenAI's newer name of the role that chat templates call "system".
        return {**given, "role": "system" if self.role == "developer" else self.role}


@_with_sampling
class ChatRequest(_GenerationRequest):
    """POST /v1/chat/completions."""

    endpoint = "chat"
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the template, as vLLM has them
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None


@_with_sampling
class CompletionRequest(_GenerationRequest):
    """POST /v1/completions."""

    endpoint = "completions"
    prompt: Annotated[list[str | list[int]], Field(min_length=1, fail_fast=True), BeforeValidator(_prompts)]


class TokenizeRequest(_Strict):
    """POST /tokenize: a prompt, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message] | None, Field(min_length=1, fail_fast=True)] = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    # As the endpoints make tokens of prompts and chats.
    add_special_tokens: Literal[False] | None = None
    add_generation_prompt: Literal[True] | None = None


class DetokenizeRequest(_Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


_INLINE_BYTES = 64 << 10  # a body of this size is parsed in less time than a thread takes to start
_NO_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"

Model = TypeVar("Model", bound=BaseModel)


async def read(request: Request, model: type[Model]) -> Model:
    """The request's body as `model`. Raises ApiError for an invalid body."""
    body = await request.body()  # whole, before any answer: a client that is still sending might not see it
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if not re.fullmatch(r"application/(.+\+)?json", media_type):
        raise ApiError(400, _NO_OBJECT)
    if len(body) <= _INLINE_BYTES:
        return parse(body, model)
    return await asyncio.to_thread(parse, body, model)


def parse(body: bytes, model: type[Model]) -> Model:
    """A body as `model`. Raises ApiError for its first error."""
    try:
        data = from_json(body.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, _NO_OBJECT)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False)[0]) from error


def _invalid(error: ErrorDetails) -> ApiError:
    """The answer to an error of pydantic's, with the name of the parameter."""
    kind, loc = error["type"], [str(part) for part in error["loc"] if "[" not in str(part)]  # unions, keys
    if kind == UNKNOWN:
        loc.append(error["ctx"]["name"])
    param = cut(".".join(loc))
    if kind == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'", param=param, code="missing_required_parameter")
    if kind == UNKNOWN:
        return ApiError(400, f"Unknown parameter: '{param}'", param=param, code=kind)
    return invalid(f"Invalid '{param}': {problem_of(error, shown, 'not')}", param)
