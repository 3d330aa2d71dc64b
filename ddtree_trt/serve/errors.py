"""Errors as OpenAI's clients expect them: a status and {"error": {message, type, param, code}}."""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ddtree_trt.errors import DDTreeError, UsageError
from ddtree_trt.runtime.async_llm import QueueFull
from ddtree_trt.serve.protocol import UNSUPPORTED
from ddtree_trt.serve.responses import event

INVALID = "invalid_request_error"
SERVER = "server_error"
OVERLOADED = "rate_limit_error"
CLOSE = {"Connection": "close"}

log = logging.getLogger(__name__)


class ApiError(Exception):
    """A request that is not answered as asked."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        # A client's text may hold surrogates, which have no UTF-8.
        texts = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": {k: v and v.encode("utf-8", "backslashreplace").decode() for k, v in texts.items()}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def error_event(error: ApiError) -> str:
    """The event that ends a stream which cannot go on. No [DONE] follows it."""
    return event(json.dumps(error.body()))


def shutting_down() -> ApiError:
    headers = {"Retry-After": "5", **CLOSE}
    return ApiError(503, "the server is shutting down; try another", kind=SERVER, code="shutting_down", headers=headers)


def overloaded(message: str, retry_after_s: int) -> ApiError:
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(429, message, kind=OVERLOADED, code="queue_full", headers=headers)


def timed_out(seconds: float) -> ApiError:
    message = f"the request took longer than this server's limit of {seconds:g} s and was ended"
    return ApiError(504, message, kind=SERVER, code="timeout", headers=CLOSE)


def as_api_error(error: Exception, retry_after_s: int = 1) -> ApiError:
    """The answer to whatever ended a request. What nobody foresaw is logged and answered 500 without its details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return overloaded(str(error), retry_after_s)
    if isinstance(error, UsageError):
        return ApiError(400, str(error))
    if isinstance(error, DDTreeError):
        log.error("request failed: %s", error)
        return ApiError(500, str(error), kind=SERVER, code="engine_error")
    log.error("unexpected error", exc_info=error)
    message = f"unexpected {type(error).__name__}; the server's log says more"
    return ApiError(500, message, kind=SERVER, code="internal_error")


def invalid_body(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's complaints, in words that name the parameter."""
    first = errors[0]
    kind, loc = first["type"], [str(part) for part in first["loc"] if part != "body"]
    if kind == "json_invalid":
        position = loc[0] if loc else "0"
        problem = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not valid JSON: {problem} at character {position}", code="invalid_json")
    param = ".".join(loc) or None
    if kind in ("model_attributes_type", "dict_type") and param is None:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    if param is None:
        return ApiError(400, f"the body cannot be used: {first['msg']}")
    if kind == "extra_forbidden":
        reason = UNSUPPORTED.get(".".join(part for part in loc if not part.isdigit()))
        known = f"Unsupported parameter: '{param}' ({reason})" if reason else f"Unknown parameter: '{param}'"
        return ApiError(400, known, param=param, code="unsupported_parameter" if reason else "unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'", param=param, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    if kind.endswith(("_type", "_parsing")):
        message += f", not {reprlib.repr(first['input'])}"
    return ApiError(400, f"Invalid '{param}': {message}", param=param, code="invalid_value")


def install(app: FastAPI, retry_after_s: Callable[[], int]) -> None:
    """Answer every kind of error in OpenAI's shape."""

    async def api_error(_: Request, error: Exception) -> JSONResponse:
        return as_api_error(error, retry_after_s()).response()

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        # Wrong paths and methods; the framework uses it for bodies it could not parse, too.
        message = f"{request.method} {request.url.path}: {error.detail}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def validation_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return invalid_body(error.errors()).response()

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(DDTreeError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(Exception, api_error)
