"""Parsing and checking of request bodies: up to the first error, a large body in another thread than the event
loop's."""

from __future__ import annotations

import asyncio
import codecs
import re
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from ddtree_trt.errors import shown
from ddtree_trt.reading import problem_of
from ddtree_trt.serve.errors import ApiError, cut, invalid
from ddtree_trt.serve.openai.protocol import UNKNOWN

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
    kind, loc = error["type"], [str(part) for part in error["loc"] if part != "[key]"]
    if kind in UNKNOWN:
        loc.append(error["ctx"]["name"])
    param = cut(".".join(loc))
    if kind == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'", param=param, code="missing_required_parameter")
    if kind in UNKNOWN:
        reason = error["msg"] and f" ({error['msg']})"
        message = f"{'Unsupported' if reason else 'Unknown'} parameter: '{param}'{reason}"
        return ApiError(400, message, param=param, code=kind)
    return invalid(f"Invalid '{param}': {problem_of(error, shown, 'not')}", param)
