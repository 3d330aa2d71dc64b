"""Parsing and checking of request bodies, in time and memory bounded by their size.

A few megabytes of JSON can hold a million objects, which take a second to make and longer to report errors of. So the
objects are counted before the text is parsed, and checking ends at the first error. A large body is parsed in another
thread than the event loop's.
"""

from __future__ import annotations

import asyncio
import json
import re
from itertools import accumulate
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ddtree_trt.errors import shown
from ddtree_trt.reading import problem_of
from ddtree_trt.serve.errors import ApiError, cut, invalid
from ddtree_trt.serve.openai.protocol import UNKNOWN

MAX_VALUES = 1 << 18  # numbers, texts, lists and objects of one body: a prompt of token ids is a value per token
MAX_STRINGS = 50_000  # texts and keys among them: a message has four
MAX_DEPTH = 32
_INLINE_BYTES = 64 << 10  # a body of this size is parsed in less time than a thread takes to start
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - set(_STEPS))
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
    _check_structure(body)
    try:
        data = json.loads(body.decode("utf-8-sig"))
    except ValueError as error:
        problem = "a number has too many digits"
        if isinstance(error, UnicodeDecodeError):
            problem = f"byte {error.start} is not UTF-8"
        elif isinstance(error, json.JSONDecodeError):
            problem = f"{error.msg} at character {error.pos}"
        raise ApiError(400, f"the body is not valid JSON: {problem}", code="invalid_json") from error
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


def _check_structure(body: bytes) -> None:
    """Raises ApiError for a body with too many values, texts or levels of nesting.

    Quotes separate texts from the rest. In invalid JSON the counts are right up to its first error.
    """
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    _check_count("texts and keys", bare.count(b'"') // 2, MAX_STRINGS)
    outside = b"".join(bare.split(b'"')[::2])
    _check_count("values", outside.count(b",") + outside.count(b"[") + outside.count(b"{") + 1, MAX_VALUES)
    brackets = outside.translate(None, _NO_BRACKETS)
    _check_count("levels of nesting", max(accumulate(map(_STEPS.__getitem__, brackets)), default=0), MAX_DEPTH)


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        message = f"the body has {count} {what}; this server takes at most {most}"
        raise ApiError(400, message, code="body_too_complex")
