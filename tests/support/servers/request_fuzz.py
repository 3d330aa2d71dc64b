"""Requests that no client should send, as a function of a seed."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
FIELDS = (
    "messages prompt model stream stream_options n max_tokens max_completion_tokens temperature top_p top_k min_p seed "
    "presence_penalty frequency_penalty repetition_penalty logit_bias stop stop_token_ids min_tokens ignore_eos "
    "logprobs top_logprobs echo include_stop_str_in_output skip_special_tokens method tree_budget user metadata "
    "response_format "
    "store tools tool_choice parallel_tool_calls chat_template_kwargs best_of suffix whatever"
).split()
HUGE, TINY = 10**400, 1e-320
NUMBERS = (
    0,
    1,
    2,
    -1,
    3,
    17,
    64,
    65,
    255,
    2**31 - 1,
    2**31,
    2**63,
    2**64,
    -(2**63),
    HUGE,
    -HUGE,
    TINY,
    1e-38,
    1e308,
    0.5,
)
TEXTS = (
    *("", "x", "auto", "ar", "5", "true", "null", "\ud800", "a\udfff", "\x00", "é" * 50, "😀", "x" * 300, "y" * 5000),
    "\u202e",
    "../../etc/passwd",
    "{{ 7 * 7 }}",
    "{% for x in y %}",
    "<|im_end|>",
    "\\",
    '"',
    "%s%n",
    "\r\n",
)
VALUES: tuple[Any, ...] = (*NUMBERS, *TEXTS, None, True, False, float("nan"), float("inf"), -float("inf"), [], {}, [[]])


@dataclass
class Sent:
    """A request, and whether its client stays for the answer."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON))
    leaves: bool = False


def fuzzed(seed: int) -> Sent:
    """The request of a seed."""
    rng = random.Random(seed)
    kind = rng.choices(
        (_valid_one, _fields, _structure, _damaged, _deep, _wide, _odd_request, _leaving),
        (10, 45, 13, 13, 4, 4, 5, 6),
    )[0]
    return kind(rng)


def _value(rng: random.Random, depth: int = 3) -> Any:
    shape = rng.random()
    if depth == 0 or shape < 0.7:
        return rng.choice(VALUES)
    if shape < 0.85:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    keys = ("role", "content", "type", "text", "name", "5", "-1", "x", "\ud800", "include_usage", "function")
    return {rng.choice(keys): _value(rng, depth - 1) for _ in range(rng.randrange(4))}


def _valid(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A request that would be answered, in a few tokens."""
    common: dict[str, Any] = {"max_tokens": rng.randrange(1, 6), "stream": rng.random() < 0.3}
    if rng.random() < 0.5:
        return CHAT, {**common, "messages": [{"role": "user", "content": rng.choice(("hello", "What is 3 + 4?"))}]}
    return COMPLETIONS, {**common, "prompt": rng.choice(("x", [5, 6, 7], ["a", "b"]))}


def _valid_one(rng: random.Random) -> Sent:
    path, body = _valid(rng)
    body |= {"temperature": rng.choice((0, 0.7)), "seed": rng.randrange(9), "n": rng.choice((1, 1, 2))}
    return Sent("POST", path, json.dumps(body).encode())


def _fields(rng: random.Random) -> Sent:
    path, body = _valid(rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        body[rng.choice(FIELDS)] = _value(rng)
    return Sent("POST", path, json.dumps(body).encode())


def _structure(rng: random.Random) -> Sent:
    """Messages, prompts and their parts of wrong kinds."""
    path, body = _valid(rng)
    name = "messages" if path == CHAT else "prompt"
    item = body[name][0] if isinstance(body[name], list) else body[name]
    odd = (
        {**item, rng.choice(("role", "content", "tool_calls", "x")): _value(rng)}
        if isinstance(item, dict)
        else _value(rng)
    )
    items = [rng.choice((item, odd, _value(rng))) for _ in range(rng.randrange(5))]
    return Sent("POST", path, json.dumps({**body, name: items}).encode())


def _damaged(rng: random.Random) -> Sent:
    """Bytes cut off, changed, or put in twice."""
    path, body = _valid(rng)
    text = bytearray(json.dumps(body).encode())
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(text))
        if rng.random() < 0.3:
            del text[at:]
        elif rng.random() < 0.6:
            text[at] = rng.randrange(256)
        else:
            text[at:at] = text[rng.randrange(len(text)) :]
        text = text or bytearray(b"{")
    return Sent("POST", path, bytes(text))


def _deep(rng: random.Random) -> Sent:
    levels = rng.choice((10, 31, 33, 500, 100_000))
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
    value = opening * levels + rng.choice(("", "1")) + closing * rng.choice((0, levels))
    return Sent("POST", CHAT, f'{{"{rng.choice(FIELDS)}": {value}}}'.encode())


def _wide(rng: random.Random) -> Sent:
    """Many of one thing, up to what the body may hold."""
    item = rng.choice(("5", "{}", "[]", '"x"', "1e5", '{"role": "user", "content": "x"}', '{"a": 1}', "null"))
    count = rng.choice((100, 3000, 60_000, 400_000 // len(item)))
    start = '"max_tokens": 2, "stream": false, '
    if rng.random() < 0.3:
        members = ",".join(f'"{i}": 1' for i in range(min(count, 60_000)))
        return Sent("POST", CHAT, f"{{{start}{members}}}".encode())
    name = rng.choice(("messages", "prompt", "stop", "stop_token_ids", "metadata", "user", "x"))
    path = COMPLETIONS if name == "prompt" else CHAT
    return Sent("POST", path, f'{{{start}"{name}": [{",".join([item] * count)}]}}'.encode())


def _odd_request(rng: random.Random) -> Sent:
    paths: tuple[str, ...] = (
        CHAT,
        COMPLETIONS,
        "/v1/models",
        "/v1/models/x",
        "/v1/models/%00",
        "/",
        "/v1/",
        "/health",
        "/metrics",
    )
    paths = (*paths, "/openapi.json", "/metrics/", "//", "/v1/../health", "/docs", "/%ff", "/v1/models/" + "x" * 3000)
    types = (
        "application/json",
        "text/plain",
        "application/x-www-form-urlencoded",
        "",
        "application/json; charset=utf-16",
    )
    method = rng.choice(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"))
    body = rng.choice((b"", b"{}", b"null", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"[" * 2000, b"a=b"))
    return Sent(method, rng.choice(paths), body, {"Content-Type": rng.choice(types)})


def _leaving(rng: random.Random) -> Sent:
    path, body = _valid(rng)
    body |= {"max_tokens": 200, "ignore_eos": True, "stream": rng.random() < 0.7}
    return Sent("POST", path, json.dumps(body).encode(), leaves=True)
