"""Wrong requests at every door: each gets its status, the parameter at fault, and a text that says what to do."""

import json
from contextlib import suppress
from typing import Any

import httpx
import openai
import pydantic
import pytest
from pacing import WAIT_S
from serving import ThreadServer, metrics

from ddtree_trt.serve.openai.protocol import ChatRequest

CHAT, COMPLETIONS, ROUNDS = "/v1/chat/completions", "/v1/completions", "/playground/rounds"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
USER: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
JSON = {"Content-Type": "application/json"}
TOOL = {"type": "function", "function": {"name": "f"}}


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error in OpenAI's shape."""
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"].endswith("_error")
    return error


def chat(fields: dict[str, Any], param: str, text: str) -> tuple[str, dict[str, Any], str, str]:
    return CHAT, {**USER, **fields}, param, text


def said(fields: dict[str, Any], param: str, text: str) -> tuple[str, dict[str, Any], str, str]:
    """A wrong message."""
    return CHAT, {"messages": [{"role": "user", "content": "x", **fields}]}, f"messages.0{param}", text


def prompt(fields: dict[str, Any], param: str, text: str) -> tuple[str, dict[str, Any], str, str]:
    return COMPLETIONS, {"prompt": "x", **fields}, param, text


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    # The messages of a chat
    (CHAT, {}, "messages", "Missing required parameter: 'messages'"),
    chat({"messages": []}, "messages", "at least 1 item"),
    chat({"messages": [{"role": "user"}]}, "messages", "a role and a content, texts: message 0 is"),
    said({"role": "wizard"}, ".role", "'system', 'developer', 'user', 'assistant' or 'tool'"),
    said({"content": 5}, ".content", "a text, not 5"),
    said({"content": [{"type": "image_url", "image_url": {}}]}, ".content", "not {'image_url'"),
    chat({"messages": [{**USER["messages"][0], "name": "bob"}]}, "messages", "no place for the name of a message"),
    chat({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages", "tool_calls[0] of message 0 must be"),
    # Names, and what clients send beside the sampling parameters
    chat({"foo": 1}, "foo", "Unknown parameter: 'foo'"),
    chat({"stream_options": {"y": 1, "x": 1}, "stream": True}, "stream_options.y", "Unknown parameter"),
    chat({"service_tier": "flex"}, "service_tier", "must be 'auto' or 'default'"),
    chat({"stream": "yes"}, "stream", "must be true or false, not 'yes'"),
    chat({"stream_options": {"include_usage": True}}, "stream_options", "needs stream: true"),
    chat({"chat_template_kwargs": {"no": 1}}, "chat_template_kwargs", "no such variable"),
    # Tools
    chat({"tools": [TOOL]}, "tools", "this engine's chat template has no place for them; leave them out"),
    # Sampling parameters: what the server adds to the rules of SamplingParams
    chat({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens must be an integer from 1"),
    chat({"max_tokens": 1_000_000}, "max_tokens", "max_tokens 1000000 does not fit: the prompt leaves "),
    chat({"min_tokens": 1_000_000}, "min_tokens", "min_tokens 1000000 does not fit: the prompt leaves "),
    chat({"method": "draft-model"}, "method", "drafter"),
    chat({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "at most 300 entries, not 301"),
    chat({"stop": ["x"] * 17}, "stop", "at most 16"),
    chat({"top_logprobs": 3}, "top_logprobs", "needs logprobs: true"),
    # Constraints on the output
    chat({"response_format": {"type": "xml"}}, "response_format", "must be {'type': 'text'}, {'type'"),
    chat({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    chat({"guided_regex": "a", "guided_json": {}}, "guided_regex", "is a second constraint"),
    chat({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "not json_schema and regex"),
    # Prompts
    (COMPLETIONS, {}, "prompt", "Missing required parameter: 'prompt'"),
    prompt({"prompt": ""}, "prompt", "has no tokens"),
    prompt({"prompt": 5}, "prompt", "a list of token ids"),
    prompt({"prompt": ["a", [1]]}, "prompt", "a list of texts or of such lists"),
    prompt({"prompt": [999_999]}, "prompt", "outside the vocabulary"),
    prompt({"prompt": ["x"] * 265}, "prompt", "265 completions in one request; at most 264"),
    prompt({"prompt": ["x"] * 5, "n": 60}, "n", "300 completions in one request; at most 264"),
    # Tokens, and the playground
    (TOKENIZE, {}, "prompt", "one of prompt and messages"),
    (TOKENIZE, {"prompt": "x", "tools": [TOOL]}, "messages", "need messages"),
    (TOKENIZE, {"prompt": "x" * 200_000}, "prompt", "200000 characters"),
    (ROUNDS, {**USER, "n": 2}, "n", "must be 1"),
    (DETOKENIZE, {"tokens": [5, -1]}, "tokens", "token id -1 is outside the vocabulary"),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "text"), WRONG, ids=lambda value: repr(value)[:50] if isinstance(value, dict) else ""
)
def test_wrong_parameters_are_refused_by_name(
    server: ThreadServer, path: str, body: dict[str, Any], param: str, text: str
) -> None:
    # Python's own JSON, which has NaN and lone surrogates, as a careless client might send it.
    response = server.http.post(path, content=json.dumps(body), headers=JSON)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"] == param and text in error["message"], error
    assert error["type"] == "invalid_request_error" and error["code"]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{", "invalid_json"),
        (b'{"prompt": "\\udfff"}', "invalid_json"),
        (b'{"messages": [}', "invalid_json"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "invalid_json"),
        *((content, None) for content in (b"", b"\xff\xfe", b"[1, 2]", b"null", b'{"\\ud800": 1}', b"[" * 100_000)),
    ],
)
def test_bodies_that_are_not_requests(server: ThreadServer, content: bytes, code: str | None) -> None:
    for path in (CHAT, COMPLETIONS):
        response = server.http.post(path, content=content, headers=JSON)
        assert response.status_code == 400, response.text
        error = error_of(response)
        assert error["type"] == "invalid_request_error" and error["code"] == (code or error["code"])


def test_a_forgotten_content_type_is_explained(server: ThreadServer) -> None:
    for kind, status in (("text/plain", 400), ("application/json; charset=utf-8", 200), ("application/x+json", 200)):
        content = json.dumps({**USER, "max_tokens": 1})
        response = server.http.post(CHAT, content=content, headers={"Content-Type": kind})
        assert response.status_code == status
        assert status == 200 or "Content-Type: application/json" in error_of(response)["message"]


def test_wrong_paths_methods_and_models(server: ThreadServer) -> None:
    elsewhere = {"Host": "elsewhere.example"}
    for response, status in (
        *((server.http.get(path), 404) for path in ("/v1/nothing", "/nothing", "/metrics/", "/v1/models/ü/ö")),
        (server.http.get("/health/", headers=elsewhere), 404),  # and no redirect to what the Host header says
        *((server.http.get(CHAT), 405), (server.http.delete("/health"), 405)),
        *((server.chat(model="gpt-4o"), 404), (server.chat(model="ü/ö"), 404)),
        (server.http.post(TOKENIZE, json={"prompt": "x", "model": "gpt-4o"}), 404),
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
        assert error["param"] == param and f"at most {limit - 1} " in error["message"]
    fits = server.http.post(COMPLETIONS, json={"prompt": [5] * (limit - 1), "max_tokens": 1})
    assert fits.status_code == 200 and fits.json()["usage"]["total_tokens"] == limit


def test_refusals_reach_the_official_client_as_its_exceptions(client: openai.OpenAI) -> None:
    chats, hello = client.chat.completions, USER["messages"]
    with pytest.raises(openai.BadRequestError) as error:
        chats.create(model="tiny", messages=hello, temperature=-1)
    assert error.value.param == "temperature" and error.value.code == "invalid_value"
    with pytest.raises(openai.BadRequestError, match="top_k"):  # a stream is refused before it begins
        client.completions.create(model="tiny", prompt="x", stream=True, extra_body={"top_k": -1})
    with pytest.raises(openai.NotFoundError, match="POST /v1/responses: Not Found"):
        client.responses.create(model="tiny", input="x")
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("gpt-4o")
    assert missing.value.code == "model_not_found"


def test_the_api_key_is_asked_for(guarded: ThreadServer) -> None:
    key = guarded.http.headers["authorization"].removeprefix("Bearer ")
    assert guarded.chat(max_tokens=2).status_code == 200
    refused = 'ddtree_requests_refused_total{status="401"}'
    with httpx.Client(base_url=guarded.url, timeout=WAIT_S) as stranger:
        before = metrics(stranger).get(refused, 0)  # as /health, without a key
        for given in (None, b"Bearer wrong", key.encode(), b"Bearer \xc3\xbc"):
            headers = {} if given is None else {b"Authorization": given}
            for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/nothing")):
                response = stranger.request(method, path, headers=headers)
                assert response.status_code == 401
                assert error_of(response)["code"] == "invalid_api_key" and key not in response.text
        assert stranger.get("/health").status_code == 200
        assert stranger.get("/v1/models", headers={"Authorization": f"bearer {key}"}).status_code == 200
        assert metrics(stranger)[refused] == before + 12
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        client.models.list()


# Bodies that are small and become large: refused before they do, at the first thing that is wrong.


def test_bodies_that_are_too_large_are_refused(guarded: ThreadServer) -> None:
    large = json.dumps({"prompt": "x" * 300_000}).encode()
    for content in (large, iter([large[:150_000], large[150_000:]])):  # told beforehand, and found out on the way
        response = guarded.http.post(COMPLETIONS, content=content, headers=JSON)
        assert response.status_code == 413
        assert "200000 bytes" in error_of(response)["message"]
    assert guarded.chat(max_tokens=2).status_code == 200


N = 4 << 20  # bytes, the default limit of a body
LONG = "k" * (N - 100)


def chat_with(messages: str = '[{"role": "user", "content": "x"}]', more: str = "") -> str:
    """A body, as JSON."""
    return f'{{"messages": {messages}{more}}}'


def names(count: int) -> str:
    """An object."""
    return "{" + ",".join(f'"{i}":1' for i in range(count)) + "}"


COMPLEX = {
    "wrong messages": (chat_with(f"[{'5,' * (N // 2 - 20)}5]"), "'messages.0'"),
    "empty messages": (chat_with(f"[{'{},' * 100_000}5]"), "'messages.0.role'"),
    "unknown names": (names(200_000), "Unknown parameter: '0'"),
    "unknown names of a message": (chat_with(f"[{names(40_000)}]"), "Unknown parameter: 'messages.0.0'"),
    "a long name": (chat_with(more=f', "{LONG}": 1'), "Unknown parameter: 'kkkk"),
    "a long value": (chat_with(more=f', "stream": "{LONG}"'), "must be true or false, not 'kkkk"),
    "a long part": (chat_with(f'[{{"role": "user", "content": ["{LONG}"]}}]'), "not 'kkkk"),
    "nesting": (chat_with("[" * (N // 4)), "not valid JSON"),
    "less nesting": (chat_with("[" * 33 + "]" * 33), "'messages.0'"),
    "digits": (chat_with(more=f', "seed": {"9" * (N - 100)}'), "not valid JSON"),
    "wrong parts": (chat_with(f'[{{"role": "user", "content": [{"5," * 200_000}5]}}]'), "not 5"),
}


@pytest.mark.parametrize(("body", "text"), COMPLEX.values(), ids=COMPLEX.keys())
def test_a_wrong_body_below_the_limit_is_refused_briefly(server: ThreadServer, body: str, text: str) -> None:
    assert len(body) <= N
    response = server.http.post(CHAT, content=body.encode(), headers=JSON)
    assert response.status_code in (400, 404), response.text[:300]
    error = response.json()["error"]
    assert text in error["message"], error["message"][:300]
    assert len(response.content) < 2000 and len(error["param"] or "") <= 200
    with suppress(ValueError, RecursionError):  # what is refused before
        with pytest.raises(pydantic.ValidationError) as found:
            ChatRequest.model_validate(json.loads(body))
        assert found.value.error_count() < 50, "checking ends at the first complaint"
