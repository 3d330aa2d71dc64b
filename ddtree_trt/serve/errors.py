"""Errors in OpenAI's form: a status and {"error": {message, type, param, code}}."""

import logging
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from ddtree_trt.errors import SHOWN_CHARACTERS, DDTreeError, UsageError
from ddtree_trt.runtime.async_llm import QueueFull

CLOSE = {"Connection": "close"}

_MESSAGE_CHARACTERS = 1000  # bound for messages of any origin; texts of a request are shortened more

log = logging.getLogger(__name__)


def cut(text: str, most: int = SHOWN_CHARACTERS) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


@dataclass(eq=False)
class ApiError(Exception):
    """An error answer to a request."""

    status: int
    message: str
    param: str | None = field(default=None, kw_only=True)
    code: str | None = field(default=None, kw_only=True)
    headers: dict[str, str] = field(default_factory=dict, kw_only=True)

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        kind = "server" if self.status >= 500 else "rate_limit" if self.status == 429 else "invalid_request"
        message, param = cut(self.message, _MESSAGE_CHARACTERS), self.param and cut(self.param)
        return {"error": {"message": message, "type": f"{kind}_error", "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def invalid(message: str, param: str | None) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


def shutting_down() -> ApiError:
    headers = {"Retry-After": "5", **CLOSE}
    return ApiError(503, "the server is shutting down; try another", code="shutting_down", headers=headers)


def overloaded(message: str, **headers: str) -> ApiError:
    return ApiError(429, message, code="queue_full", headers={"Retry-After": "1", **headers})


def as_api_error(error: Exception) -> ApiError:
    """The answer to an exception that ended a request; an unexpected one is logged, and answered without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return overloaded(str(error))
    if isinstance(error, UsageError):
        return ApiError(400, str(error))
    if isinstance(error, DDTreeError):
        log.error("request failed: %s", error)
        return ApiError(500, str(error), code="engine_error")
    log.error("unexpected error", exc_info=error)
    message = f"unexpected {type(error).__name__}; the server's log says more"
    return ApiError(500, message, code="internal_error")


async def answer(request: Request, error: Exception) -> JSONResponse:
    """Any exception in OpenAI's form."""
    if isinstance(error, HTTPException):  # for wrong paths and methods
        message = f"{request.method} {cut(request.url.path)}: {error.detail}"
        error = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return as_api_error(error).response()


HANDLERS: Any = dict.fromkeys((ApiError, DDTreeError, HTTPException, Exception), answer)
