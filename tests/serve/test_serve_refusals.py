"""Wrong requests: each gets its status, the parameter at fault, and a text that says what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from pacing import WAIT_S
from serving import ThreadServer, metrics, thread_server

from ddtree_trt.serve.errors import ApiError
from ddtree_trt.serve.openai.body import parse
from ddtree_trt.serve.openai.protocol import ChatRequest, CompletionRequest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"messages": [{"role": "user", "content": "x"}]}
KEY = "correct horse"


@pytest.fixture(scope="module")
def server(tiny_engine: Path) -> Iterator[ThreadServer]:
    with thread_server(tiny_engine, max_waiting=4) as server:
        yield server


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error in OpenAI's shape."""
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"].endswith("_error")
    return error


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **fields}]}


TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
WRONG_CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "messages", "Missing required parameter: 'messages'"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": "hello"}, "messages", "a list, not 'hello'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "Missing required parameter"),
    (message(role="wizard"), "messages.0.role", "'system', 'developer', 'user', 'assistant' or 'tool'"),
    (message(content=5), "messages.0.content", "a text, not 5"),
    (message(content=None), "messages.0.content", "must be a text"),
    (message(content=[{"type": "image_url", "image_url": {}}]), "messages.0.content", "not 'image_url'"),
    (message(content=[{"type": "text", "text": "a", "x": 1}]), "messages.0.content", "has no 'x'"),
    (message(name="bob"), "messages.0.name", "Unsupported parameter: 'messages.0.name' (the chat template"),
    (message(tool_calls=[{}]), "messages.0.tool_calls.0.function", "Missing required parameter"),
    (message(tool_calls=[CALL]), "messages.0", "tool_calls is for messages of role 'assistant', not of 'user'"),
    (message(reasoning_content="x"), "messages.0", "reasoning_content is for messages of role 'assistant'"),
    (message(tool_call_id="x"), "messages.0", "tool_call_id is for messages of role 'tool'"),
    (message(content="\ud800"), "messages.0.content", "half of a surrogate pair"),
    ({**USER, "foo": 1}, "foo", "Unknown parameter: 'foo'"),
    ({**USER, "\ud800": True}, "\\ud800", "Unknown parameter"),
    ({**USER, "metadata": {"\ud800": 1}}, "metadata.\ufffd\ufffd\ufffd", "a text, not 1"),
    ({**USER, "method": "\ud800"}, "method", "not '\\ud800'"),
    ({**USER, "echo": True}, "echo", "Unknown parameter: 'echo'"),
    ({**USER, "tools": []}, "tools", "must be a list of at least one tool, not []"),
    ({**USER, "tools": [TOOL]}, "tools", "this engine's chat template has no place for them; leave them out"),
    ({**USER, "tools": [TOOL, TOOL]}, "tools[1].function.name", "'f' is there twice; rename one of the two"),
    ({**USER, "tools": [{"type": "custom"}]}, "tools[0]", "{'type': 'function', 'function': {...}}; found 'custom'"),
    ({**USER, "tool_choice": "auto"}, "tool_choice", "needs tools; give them, or leave tool_choice out"),
    ({**USER, "parallel_tool_calls": True}, "parallel_tool_calls", "needs tools"),
    ({**USER, "functions": []}, "functions", "Unsupported parameter: 'functions' (give tools, in chats)"),
    ({**USER, "reasoning_effort": "low"}, "reasoning_effort", "(use chat_template_kwargs, such as {"),
    ({**USER, "service_tier": "flex"}, "service_tier", "must be 'auto' or 'default'"),
    ({**USER, "response_format": {"type": "xml"}}, "response_format", "type must be one of text, json_object"),
    ({**USER, "store": True}, "store", "must be False"),
    ({**USER, "stream": "yes"}, "stream", "must be true or false, not 'yes'"),
    ({**USER, "stream_options": {"include_usage": True}}, "stream_options", "needs stream: true"),
    ({**USER, "max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens must be an integer from 1"),
    ({**USER, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ; give one"),
    ({**USER, "max_tokens": 1_000_000}, "max_tokens", "max_tokens 1000000 does not fit: the prompt leaves "),
    ({**USER, "min_tokens": 9, "max_tokens": 5}, "min_tokens", "above max_tokens (5)"),
    ({**USER, "n": 64}, "n", "lower it"),
    ({**USER, "logit_bias": {"999999": 1}}, "logit_bias", "outside the vocabulary"),
    ({**USER, "stop": ["a", 5]}, "stop.1", "must be a text"),
    ({**USER, "stop": ["x"] * 17}, "stop", "at most 16"),
    ({**USER, "stop": "x" * 257}, "stop", "at most 256"),
    ({**USER, "stop_token_ids": [5] * 65}, "stop_token_ids", "at most 64"),
    ({**USER, "metadata": {str(i): "x" for i in range(17)}}, "metadata", "at most 16 entries, not 17"),
    ({**USER, "logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "at most 300 entries"),
    ({**USER, "stream_options": {"y": 1, "x": 1}, "stream": True}, "stream_options.y", "Unknown parameter"),
    ({"messages": USER["messages"] * 2100}, "messages", "2100 messages"),
    ({**USER, "stop_token_ids": [999_999]}, "stop_token_ids", "outside the vocabulary"),
    ({**USER, "logprobs": 3}, "logprobs", "must be true or false"),
    ({**USER, "top_logprobs": 3}, "top_logprobs", "needs logprobs: true"),
    ({**USER, "method": "draft-model"}, "method", "drafter"),
    ({**USER, "method": "ar", "tree_budget": 4}, "method", "drafts nothing"),
    ({**USER, "tree_budget": 10**6}, "tree_budget", "above this engine's"),
]  # fmt: skip

WRONG_COMPLETIONS: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "prompt", "Missing required parameter: 'prompt'"),
    ({"prompt": ""}, "prompt", "has no tokens"),
    ({"prompt": []}, "prompt", "has no tokens"),
    ({"prompt": 5}, "prompt", "a list of token ids"),
    ({"prompt": ["a", [1]]}, "prompt", "all texts or all lists"),
    ({"prompt": [1, "a"]}, "prompt", "a list of token ids"),
    ({"prompt": [999_999]}, "prompt", "outside the vocabulary"),
    ({"prompt": [-1]}, "prompt", "outside the vocabulary"),
    ({"prompt": "\udfff"}, "prompt", "half of a surrogate pair"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "does not fill in the middle"),
    ({"prompt": "x", "best_of": 2}, "best_of", "Unsupported parameter"),
    ({"prompt": "x", "logprobs": True}, "logprobs", "must be an integer"),
    ({"prompt": "x", "messages": []}, "messages", "Unknown parameter"),
    ({"prompt": ["x"] * 2049}, "prompt", "at most 2048 prompts in one request, not 2049"),
    ({"prompt": ["x"] * 20}, "prompt", "20 completions in one request; at most 12"),
    ({"prompt": ["x"] * 5, "n": 3}, "prompt", "15 completions in one request; at most 12"),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [(CHAT, *row) for row in WRONG_CHATS] + [(COMPLETIONS, *row) for row in WRONG_COMPLETIONS],
    ids=lambda value: repr(value)[:50] if isinstance(value, dict) else "",
)
def test_wrong_parameters_are_refused_by_name(
    server: ThreadServer, path: str, body: dict[str, Any], param: str | None, text: str
) -> None:
    # Python's own JSON, which has NaN and lone surrogates, as a careless client might send it.
    content = json.dumps(body)
    response = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"] == param and text in error["message"], error
    assert error["type"] == "invalid_request_error" and error["code"]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", None),
        (b"{", "invalid_json"),
        (b'{"messages": [}', "invalid_json"),
        (b"\xff\xfe", None),
        (b"[1, 2]", None),
        (b'"text"', None),
        (b"null", None),
        (b'{"\\ud800": 1}', None),
        (b"[" * 100_000, None),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", None),
    ],
)
def test_bodies_that_are_not_requests(server: ThreadServer, content: bytes, code: str | None) -> None:
    for path in (CHAT, COMPLETIONS):
        response = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, response.text
        error = error_of(response)
        assert error["type"] == "invalid_request_error"
        assert code is None or error["code"] == code


def test_a_forgotten_content_type_is_explained(server: ThreadServer) -> None:
    response = server.http.post(CHAT, content=json.dumps(USER), headers={"Content-Type": "text/plain"})
    assert response.status_code == 400
    assert "Content-Type: application/json" in error_of(response)["message"]


def test_wrong_paths_methods_and_models(server: ThreadServer) -> None:
    for response, status in (
        (server.http.get("/v1/nothing"), 404),
        (server.http.get("/nothing"), 404),
        (server.http.get(CHAT), 405),
        (server.http.delete("/health"), 405),
        (server.http.get("/metrics/"), 404),  # and no redirect to what the Host header says
        (server.http.get("/health/", headers={"Host": "elsewhere.example"}), 404),
        (server.chat(model="gpt-4o"), 404),
        (server.chat(model="\ud800"[:0] + "ü/ö"), 404),
    ):
        assert response.status_code == status
        assert error_of(response)["type"] == "invalid_request_error"
    assert error_of(server.chat(model="gpt-4o")) == {
        "message": "the model 'gpt-4o' does not exist here; this server serves 'tiny'",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_prompts_that_are_too_long_are_refused_with_numbers(server: ThreadServer) -> None:
    limit = server.llm.engine.manifest.limits.max_seq_len
    for response, param in (
        (server.http.post(COMPLETIONS, json={"prompt": [5] * limit}), "prompt"),
        (server.http.post(COMPLETIONS, json={"prompt": ["fine", "a " * limit]}), "prompt"),
        (server.chat("a " * limit), "messages"),
        (server.chat("a" * 150_000), "messages"),  # refused by its length alone, before it is tokenised
    ):
        error = error_of(response)
        assert response.status_code == 400 and error["code"] == "context_length_exceeded"
        assert error["param"] == param and f"at most {limit - 1} prompt tokens" in error["message"]
    fits = server.http.post(COMPLETIONS, json={"prompt": [5] * (limit - 1), "max_tokens": 1})
    assert fits.status_code == 200 and fits.json()["usage"]["total_tokens"] == limit


def test_bodies_that_are_too_large_are_refused(server: ThreadServer) -> None:
    large = json.dumps({"prompt": "x" * (N + 100)}).encode()
    for content in (large, iter([large[:150_000], large[150_000:]])):  # told beforehand, and found out on the way
        response = server.http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 413
        assert f"{N} bytes" in error_of(response)["message"]
    assert server.chat(max_tokens=2).status_code == 200


def test_refusals_reach_the_official_client_as_its_exceptions(server: ThreadServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], temperature=-1)
        assert error.value.param == "temperature" and error.value.code == "invalid_value"
        with pytest.raises(openai.BadRequestError, match="tools"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], tools=[])
        with pytest.raises(openai.BadRequestError, match="top_k"):  # a stream is refused before it begins
            client.completions.create(model="tiny", prompt="x", stream=True, extra_body={"top_k": -1})


def test_the_description_names_what_the_endpoints_take(server: ThreadServer) -> None:
    description = server.http.get("/openapi.json").json()
    schemas = description["components"]["schemas"]
    for path, model in ((CHAT, ChatRequest), (COMPLETIONS, CompletionRequest)):
        body = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(schemas[body["$ref"].rpartition("/")[2]]["properties"]) == set(model.model_fields)
    text = json.dumps(description)
    assert all(ref in schemas for ref in re.findall(r"#/components/schemas/(\w+)", text))


def test_the_api_key_is_asked_for(tiny_engine: Path) -> None:
    with thread_server(tiny_engine, api_key=KEY) as server:
        assert server.chat(max_tokens=2).status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": "Bearer ü"}):
            raw: dict[Any, Any] = {k: v.encode() for k, v in headers.items()}
            for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/openapi.json"), ("GET", "/nothing")):
                with httpx.Client(base_url=server.url, timeout=WAIT_S) as stranger:
                    response = stranger.request(method, path, headers=raw)
                assert response.status_code == 401
                assert error_of(response)["code"] == "invalid_api_key" and KEY not in response.text
        with httpx.Client(base_url=server.url, timeout=WAIT_S) as stranger:
            assert stranger.get("/health").status_code == 200
            assert metrics(stranger)['ddtree_requests_refused_total{status="401"}'] == 16
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
        with client, pytest.raises(openai.AuthenticationError):
            client.models.list()


# Bodies that are small and become large: refused before they do, at the first thing that is wrong.

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
