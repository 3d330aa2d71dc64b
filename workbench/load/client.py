"""One streamed request to an OpenAI-compatible server, timed as its client sees it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from ddtree_trt.bench.prompts import BenchPrompt
from ddtree_trt.errors import DDTreeError, UsageError

_TIMEOUT_S = 3600.0  # of one read: requests of an overloaded server wait long for their first token
_MESSAGE_CHARACTERS = 300


@dataclass(frozen=True)
class Sent:
    """A request as it went. Times are seconds since the start of its level."""

    due_s: float  # when it was to be sent; later times count from here, so a client that is late is no better off
    first_s: float | None = None  # first text
    last_s: float | None = None  # last text
    gap_s: float | None = None  # longest time between two texts
    tokens: int = 0  # by the server's count
    rounds: int = 0  # of speculative decoding that verified drafts, where the server reports it
    accepted: int = 0  # draft tokens accepted in them
    error: str | None = None

    @property
    def first_token_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def whole_s(self) -> float | None:
        return None if self.last_s is None else self.last_s - self.due_s

    @property
    def per_token_s(self) -> float | None:
        """Mean time of the tokens after the first."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)


class Client:
    """A connection pool to one server. Use with `async with`."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """`url`: with or without /v1. Raises UsageError where it is none."""
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {} if not api_key else {"Authorization": f"Bearer {api_key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        try:
            self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=_TIMEOUT_S, limits=limits)
        except httpx.InvalidURL as error:
            raise UsageError(f"--url must be a URL such as http://localhost:8000, not {url!r}: {error}") from error

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """The name of the first model that the server has. Raises DDTreeError where none can be had."""
        try:
            answer = await self._http.get("/v1/models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise DDTreeError(
                f"no model is served at {self.url}: {error or type(error).__name__}; is it up?"
            ) from error

    async def send(self, prompt: BenchPrompt, fields: dict[str, Any], due_s: float, started: float) -> Sent:
        """Send a prompt's opening and read the answer. `started`: time.perf_counter() of the level's start."""
        body = {**fields, "stream": True, "stream_options": {"include_usage": True}}
        if isinstance(prompt.opening, list) and isinstance(prompt.opening[0], dict):
            path, body["messages"] = "/v1/chat/completions", prompt.opening
        else:
            path, body["prompt"] = "/v1/completions", prompt.opening
        marks: dict[str, Any] = {}
        try:
            async with self._http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode("utf-8", "replace")
                    return Sent(due_s, error=f"HTTP {answer.status_code}: {_message(text)}"[:_MESSAGE_CHARACTERS])
                async for line in answer.aiter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        _note(json.loads(data), time.perf_counter() - started, marks)
        except (httpx.HTTPError, ValueError) as error:
            return Sent(due_s, error=f"{type(error).__name__}: {error}"[:_MESSAGE_CHARACTERS])
        if "error" not in marks and "tokens" not in marks:
            marks["error"] = "the stream ended without usage (stream_options.include_usage)"
        return Sent(due_s, **marks)


def _message(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body


def _note(event: dict[str, Any], now_s: float, marks: dict[str, Any]) -> None:
    """Add what an event says to the fields of `Sent`."""
    if "error" in event:
        marks["error"] = _message(json.dumps(event))[:_MESSAGE_CHARACTERS]
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")):
            marks.setdefault("first_s", now_s)
            if "last_s" in marks:
                marks["gap_s"] = max(marks.get("gap_s", 0.0), now_s - marks["last_s"])
            marks["last_s"] = now_s
    if usage := event.get("usage"):
        stats = (event.get("metrics") or {}).get("speculative_decoding") or {}
        marks["tokens"] = usage["completion_tokens"]
        marks["rounds"] = stats.get("num_spec_steps", 0)
        marks["accepted"] = stats.get("num_accepted_draft_tokens", 0)
