"""Requests that no client should send, as a function of a seed."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

from fuzzing import mutate_json

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
FIELDS = (
    "messages prompt model stream stream_options n max_tokens max_completion_tokens temperature top_p top_k min_p seed "
    "presence_penalty frequency_penalty repetition_penalty logit_bias stop stop_token_ids min_tokens ignore_eos "
    "logprobs top_logprobs echo include_stop_str_in_output skip_special_tokens method tree_budget user metadata "
    "response_format store tools tool_choice parallel_tool_calls chat_template_kwargs best_of suffix whatever"
).split()
VALUES: tuple[Any, ...] = (
    *(0, 1, 2, -1, 3, 17, 64, 65, 255, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63), 10**400, -(10**400)),
    *(1e-320, 1e-38, 1e308, 0.5, None, True, False, float("nan"), float("inf"), -float("inf"), [], {}, [[]]),
    *("", "x", "auto", "ar", "5", "true", "null", "\ud800", "a\udfff", "\x00", "é" * 50, "😀", "x" * 300, "y" * 5000),
    *("\u202e", "../../etc/passwd", "{{ 7 * 7 }}", "{% for x in y %}", "<|im_end|>", "\\", '"', "%s%n", "\r\n"),
)
PATHS = (
    *(CHAT, COMPLETIONS, "/v1/models", "/v1/models/x", "/v1/models/%00", "/", "/v1/", "/health", "/metrics", "/%ff"),
    *("/metrics/", "//", "/v1/../health", "/docs", "/v1/models/" + "x" * 3000),
)
TYPES = ("application/json", "text/plain", "application/x-www-form-urlencoded", "", "application/json; charset=utf-16")
BODIES = (b"", b"{}", b"null", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"[" * 2000, b"a=b")


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
    path, body = _valid(rng)
    kind = rng.choices(("valid", "fields", "mutated", "deep", "wide", "odd", "leaving"), (10, 45, 26, 4, 4, 5, 6))[0]
    if kind == "valid":
        body |= {"temperature": rng.choice((0, 0.7)), "seed": rng.randrange(9), "n": rng.choice((1, 1, 2))}
    elif kind == "fields":
        body |= {rng.choice(FIELDS): _value(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))}
    elif kind == "mutated":
        return Sent("POST", path, mutate_json(json.dumps(body), rng))
    elif kind == "deep":
        return Sent("POST", CHAT, _deep(rng).encode())
    elif kind == "wide":
        return _wide(rng)
    elif kind == "odd":
        method = rng.choice(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"))
        return Sent(method, rng.choice(PATHS), rng.choice(BODIES), {"Content-Type": rng.choice(TYPES)})
    else:
        body |= {"max_tokens": 200, "ignore_eos": True, "stream": rng.random() < 0.7}
    return Sent("POST", path, json.dumps(body).encode(), leaves=kind == "leaving")


def _valid(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A request that would be answered, in a few tokens."""
    common: dict[str, Any] = {"max_tokens": rng.randrange(1, 6), "stream": rng.random() < 0.3}
    if rng.random() < 0.5:
        return CHAT, {**common, "messages": [{"role": "user", "content": rng.choice(("hello", "What is 3 + 4?"))}]}
    return COMPLETIONS, {**common, "prompt": rng.choice(("x", [5, 6, 7], ["a", "b"]))}


def _value(rng: random.Random, depth: int = 3) -> Any:
    shape = rng.random()
    if depth == 0 or shape < 0.7:
        return rng.choice(VALUES)
    if shape < 0.85:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    keys = ("role", "content", "type", "text", "name", "5", "-1", "x", "\ud800", "include_usage", "function")
    return {rng.choice(keys): _value(rng, depth - 1) for _ in range(rng.randrange(4))}


def _deep(rng: random.Random) -> str:
    levels = rng.choice((10, 31, 33, 500, 100_000))
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
    value = opening * levels + rng.choice(("", "1")) + closing * rng.choice((0, levels))
    return f'{{"{rng.choice(FIELDS)}": {value}}}'


def _wide(rng: random.Random) -> Sent:
    """Many of one thing, up to what the body may hold."""
    item = rng.choice(("5", "{}", "[]", '"x"', "1e5", '{"role": "user", "content": "x"}', '{"a": 1}', "null"))
    count = rng.choice((100, 3000, 60_000, 400_000 // len(item)))
    name = rng.choice(("messages", "prompt", "stop", "stop_token_ids", "metadata", "user", "x"))
    members = f'"{name}": [{",".join([item] * count)}]'
    if rng.random() < 0.3:
        members = ",".join(f'"{i}": 1' for i in range(min(count, 60_000)))
    body = f'{{"max_tokens": 2, "stream": false, {members}}}'
    return Sent("POST", COMPLETIONS if name == "prompt" else CHAT, body.encode())
