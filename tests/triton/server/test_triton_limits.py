"""What is refused, and what ends a request early: the answer is a sentence, and the slot is free."""

from collections.abc import Callable
from typing import Any

import pytest
from triton_clients import LONG, ask, events, eventually, generate, grpc_stream, idle, metric, open_stream, values
from tritonclient.utils import InferenceServerException

from tools.triton_server import TritonServer

PROMPT = {"text_input": "def fib(n):"}
BOTH, TRTLLM = ("tiny", "tiny-vllm"), ("tiny",)
# Models, body of `generate`, status, part of the message. The rest is tested without a server.
BAD = [
    (BOTH, {"text_input": ""}, 400, "the prompt has no tokens"),
    (BOTH, {**PROMPT, "no_such_input": 1}, 400, "unknown sampling parameter no_such_input"),
    (BOTH, {}, 400, "missing required input(s) ['text_input']"),
    # More than one response cannot be put into one body; this is the server's own answer.
    (BOTH, {**PROMPT, "stream": True, "parameters": {"max_tokens": 40}}, 200, "use generate stream"),
    (TRTLLM, {**PROMPT, "max_tokens": 5, "parameters": {"max_tokens": 6}}, 400, "'max_tokens' already exists"),
    (TRTLLM, {**PROMPT, "max_tokens": "many"}, 500, "Unable to parse"),  # the server's own answer
]


@pytest.mark.parametrize(("models", "body", "status", "message"), BAD)
def test_bad_requests_get_a_sentence(
    server: TritonServer, models: tuple[str, ...], body: dict[str, Any], status: int, message: str
) -> None:
    for model in models:
        answer = generate(server, model, body)
        assert answer[0] == status and message in answer[1]["error"]


def cancel_grpc(server: TritonServer, model: str, request: dict[str, Any]) -> None:
    with grpc_stream(server, model, request) as responses:
        next(responses())


def cancel_http(server: TritonServer, model: str, request: dict[str, Any]) -> None:
    with open_stream(server, model, "generate_stream", request) as response:
        next(events(response))


@pytest.mark.parametrize("cancel", [cancel_grpc, cancel_http])
def test_a_cancelled_request_frees_its_slot(
    server: TritonServer, model: str, cancel: Callable[[TritonServer, str, dict[str, Any]], None]
) -> None:
    assert idle(server, model)
    before = metric(server, "ddtree_requests_total", model, outcome="cancelled")
    started = metric(server, "vllm:generation_tokens_total", model)
    cancel(server, model, values(model, PROMPT["text_input"], stream=True, **LONG))
    assert eventually(lambda: metric(server, "ddtree_requests_total", model, outcome="cancelled") == before + 1)
    assert idle(server, model)
    made = metric(server, "vllm:generation_tokens_total", model) - started
    assert 0 < made < LONG["max_tokens"], "it had its slot, and lost it"


def test_a_timeout_ends_the_request(server: TritonServer, model: str) -> None:
    before = metric(server, "ddtree_requests_total", model, outcome="timeout")
    request = values(model, PROMPT["text_input"], stream=False, **LONG)
    _, answer = generate(server, model, {**request, "parameters": {"timeout": 100_000}})
    assert "the request's timeout of 100 ms passed after" in answer["error"]
    with pytest.raises(InferenceServerException, match="timeout of 100 ms passed"):
        ask(server, model, {**request, "stream": True}, timeout=100_000)
    assert eventually(lambda: metric(server, "ddtree_requests_total", model, outcome="timeout") == before + 2)
    assert idle(server, model)


def test_broken_models_say_why_and_the_others_serve(server: TritonServer) -> None:
    index = server.index()
    assert {name for name, model in index.items() if model["state"] == "READY"} == {"tiny", "tiny-vllm"}
    assert "weights.bin is damaged: its sha256 differs" in index["damaged"]["reason"]
    assert "was exported by ddtree-trt 99." in index["other-version"]["reason"]
