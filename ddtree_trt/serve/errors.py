"""Errors in OpenAI's form: a status and {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ddtree_trt.errors import SHOWN_CHARACTERS, DDTreeError, UsageError, shown
from ddtree_trt.reading import problem_of
from ddtree_trt.runtime.async_llm import QueueFull
from ddtree_trt.serve.openai.protocol import UNKNOWN

INVALID = "invalid_request_error"
SERVER = "server_error"
OVERLOADED = "rate_limit_error"
CLOSE = {"Connection": "close"}

_MESSAGE_CHARACTERS = 1000  # bound for messages of any origin; texts of a request are shortened more

log = logging.getLogger(__name__)


def cut(text: str, most: int = SHOWN_CHARACTERS) -> str:
    """A text of at most `most` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


@dataclass(eq=False)
class ApiError(Exception):
    """An error answer to a request."""

    status: int
    message: str
    kind: str = field(default=INVALID, kw_only=True)
    param: str | None = field(default=None, kw_only=True)
    code: str | None = field(default=None, kw_only=True)
    headers: dict[str, str] = field(default_factory=dict, kw_only=True)

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        texts = {
            "message": cut(self.message, _MESSAGE_CHARACTERS),
            "type": self.kind,
            "param": None if self.param is None else cut(self.param),
            "code": self.code,
        }
        # A client's text may hold surrogates, which UTF-8 cannot encode.
        return {"error": {k: v and v.encode("utf-8", "backslashreplace").decode() for k, v in texts.items()}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def invalid(message: str, param: str | None) -> ApiError:
    """The refusal of a parameter's value."""
    return ApiError(400, message, param=param, code="invalid_value")


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
    """The answer to an exception that ended a request; an unexpected one is logged, and answered without details."""
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


def invalid_json(problem: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {problem}", code="invalid_json")


def invalid_body(error: ErrorDetails) -> ApiError:
    """The answer to an error of pydantic's, with the name of the parameter."""
    kind, loc = error["type"], [str(part) for part in error["loc"] if part != "[key]"]
    if kind in UNKNOWN:
        loc.append(error["ctx"]["name"])
    param = cut(".".join(loc))
    if kind == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'", param=param, code="missing_required_parameter")
    if kind == "unsupported_parameter":
        message = f"Unsupported parameter: '{param}' ({error['msg']})"
        return ApiError(400, message, param=param, code=kind)
    if kind == "unknown_parameter":
        return ApiError(400, f"Unknown parameter: '{param}'", param=param, code=kind)
    return invalid(f"Invalid '{param}': {problem_of(error, shown, 'not')}", param)


def install(app: FastAPI, retry_after_s: Callable[[], int]) -> None:
    """Install handlers that answer all exceptions in OpenAI's form."""

    async def api_error(_: Request, error: Exception) -> JSONResponse:
        return as_api_error(error, retry_after_s()).response()

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        # For wrong paths and methods, and for bodies that the framework could not parse.
        message = f"{request.method} {cut(request.url.path)}: {error.detail}"
        return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(DDTreeError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, api_error)
