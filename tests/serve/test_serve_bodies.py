"""Bodies that are small and become large: refused before they do, at the first thing that is wrong."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest
from serving import ThreadServer

from ddtree_trt.serve.errors import ApiError
from ddtree_trt.serve.openai.body import parse
from ddtree_trt.serve.openai.protocol import ChatRequest, CompletionRequest

CHAT = "/v1/chat/completions"
N = 4 << 20  # bytes, the default limit of a body
X = '{"role": "user", "content": "x"}'


def names(count: int) -> str:
    """Members of an object."""
    return ",".join(f'"{i}":1' for i in range(count))


COMPLEX = {
    "wrong messages": (f'{{"messages": [{"5," * (N // 2 - 20)}5]}}', "at most 262144"),
    "messages of a wrong type": (f'{{"messages": [{"5," * 200_000}5]}}', "'messages.0'"),
    "empty messages": (f'{{"messages": [{"{}," * 100_000}5]}}', "'messages.0.role'"),
    "unknown names": (f"{{{names(200_000)}}}", "200000 texts and keys"),
    "fewer of them": (f"{{{names(40_000)}}}", "Unknown parameter: '0'"),
    "unknown names of a message": (
        f'{{"messages": [{{{names(40_000)}}}]}}',
        "Unknown parameter: 'messages.0.0'",
    ),
    "a long name": (f'{{"messages": [{X}], "{"k" * (N - 100)}": 1}}', "Unknown parameter: 'kkkk"),
    "a long name of a model": (f'{{"messages": [{X}], "model": "{"k" * (N - 100)}"}}', "does not exist here"),
    "a long value": (f'{{"messages": [{X}], "stream": "{"k" * (N - 100)}"}}', "must be true or false, not 'kkkk"),
    "a long method": (f'{{"messages": [{X}], "method": "{"k" * (N - 100)}"}}', "not 'kkkk"),
    "a long role": (f'{{"messages": [{{"role": "{"k" * (N - 100)}", "content": "x"}}]}}', "messages.0.role"),
    "a long part": (f'{{"messages": [{{"role": "user", "content": ["{"k" * (N - 100)}"]}}]}}', "not 'kkkk"),
    "a long token": (f'{{"messages": [{X}], "logit_bias": {{"{"k" * (N - 100)}": 1}}}}', "must be an integer"),
    "nesting": (f'{{"messages": {"[" * (N // 4)}', "at most 262144"),
    "less nesting": (f'{{"messages": {"[" * 33}{"]" * 33}}}', "34 levels of nesting; this server takes at most 32"),
    "brackets in a text": (f'{{"messages": "{"[" * 1000}{chr(92) * 2}{chr(92)}"{"{" * 1000}"}}', "not '[[["),
    "many quotes": ('{"a":"' * 300_000, "texts and keys"),
    "digits": (f'{{"messages": [{X}], "seed": {"9" * (N - 100)}}}', "too many digits"),
    "biases": (f'{{"messages": [{X}], "logit_bias": {{{names(40_000)}}}}}', "at most 300 entries"),
    "wrong stops": (f'{{"messages": [{X}], "stop": [{"5," * 200_000}5]}}', "at most 16 entries"),
    "wrong parts": (f'{{"messages": [{{"role": "user", "content": [{"5," * 200_000}5]}}]}}', "not 5"),
}


@pytest.mark.parametrize(("body", "text"), COMPLEX.values(), ids=COMPLEX.keys())
def test_a_wrong_body_below_the_limit_is_refused_briefly(server: ThreadServer, body: str, text: str) -> None:
    assert len(body) <= N
    response = server.http.post(CHAT, content=body.encode(), headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 404), response.text[:300]
    error = response.json()["error"]
    assert text in error["message"], error["message"][:300]
    assert len(response.content) < 2000 and len(error["param"] or "") <= 200


def test_checking_ends_at_the_first_complaint() -> None:
    for body, _ in COMPLEX.values():
        try:
            ChatRequest.model_validate(json.loads(body))
        except pydantic.ValidationError as error:
            assert error.error_count() < 50
        except (ValueError, RecursionError):  # what is refused before
            pass


def test_brackets_and_quotes_within_texts_do_not_count() -> None:
    """Texts are told from the rest by their quotes, escaped ones left out."""
    for text in ('a"b', "a\\", '\\"', '"' * 9, "[{,", '\\\\"[', "\u0022["):
        body = json.dumps({"prompt": [text] * 3, "stop": text}).encode()
        assert parse(body, CompletionRequest).prompt == [text] * 3
        with pytest.raises(ApiError, match="levels of nesting"):
            parse(json.dumps({text: nested(33)}).encode(), CompletionRequest)


def nested(levels: int) -> list[Any]:
    return [nested(levels - 1)] if levels > 1 else []
