"""What is refused, and what ends a request early: the answer is a sentence, and the slot is free."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import tritonclient.grpc.aio as aioclient
from triton_clients import (
    LONG,
    ask,
    events,
    eventually,
    generate,
    generate_stream,
    grpc_stream,
    idle,
    metric,
    open_stream,
    tensors,
    text,
    values,
)
from tritonclient.utils import InferenceServerException

from tools.triton_server import TritonServer

PROMPT = {"text_input": "def fib(n):"}
BOTH, TRTLLM = ("tiny", "tiny-vllm"), ("tiny",)
# Models, body of `generate`, status, part of the message. The rest is tested without a server.
BAD = [
    (BOTH, {"text_input": ""}, 400, "the prompt has no tokens"),
    (BOTH, {"text_input": "a " * 5000}, 400, "shorten it or rebuild with a larger --max-seq-len"),
    (BOTH, {**PROMPT, "sampling_parameters": "{"}, 400, "sampling_parameters: it is not valid JSON"),
    (BOTH, {**PROMPT, "sampling_parameters": '{"tree_budget": 100000}'}, 400, "above this engine's"),
    (BOTH, {**PROMPT, "parameters": {"no_such_thing": 1}}, 400, "unknown sampling parameter no_such_thing"),
    (BOTH, {**PROMPT, "no_such_input": 1}, 400, "unknown sampling parameter no_such_input"),
    (BOTH, {**PROMPT, "parameters": {"timeout": -1}}, 400, "timeout must be microseconds"),
    (BOTH, {**PROMPT, "stream": True, "exclude_input_in_output": False}, 400, "needs stream=false"),
    (BOTH, {"stream": False}, 400, "text_input is missing"),
    (BOTH, {}, 400, "missing required input(s) ['text_input']"),
    # More than one response cannot be put into one body; this is the server's own answer.
    (BOTH, {**PROMPT, "stream": True, "parameters": {"max_tokens": 40}}, 200, "use generate stream"),
    (TRTLLM, {**PROMPT, "max_tokens": -5}, 400, "max_tokens must be an integer from 1 to 2147483647, not -5"),
    (TRTLLM, {**PROMPT, "max_tokens": 5, "parameters": {"max_tokens": 6}}, 400, "'max_tokens' already exists"),
    (TRTLLM, {**PROMPT, "max_tokens": 5, "sampling_parameters": '{"max_tokens": 6}'}, 400, "is given twice"),
    (TRTLLM, {**PROMPT, "end_id": 10**6}, 400, "outside the vocabulary"),
    (TRTLLM, {"text_input": ["a", "b"]}, 400, "batch-size must be <= 1"),
    (TRTLLM, {**PROMPT, "max_tokens": "many"}, 500, "Unable to parse"),  # the server's own answer
]


@pytest.mark.parametrize(("models", "body", "status", "message"), BAD)
def test_bad_requests_get_a_sentence(
    server: TritonServer, models: tuple[str, ...], body: dict[str, Any], status: int, message: str
) -> None:
    for model in models:
        answer = generate(server, model, body)
        assert answer[0] == status and message in answer[1]["error"]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"bad_words": ["no", "never"]}, "bad_words takes '' only; leave it out"),
        ({"stop_words": [b"\xff\xfe"]}, "stop_words is not valid UTF-8"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"no_such_input": 1}, "unexpected inference input 'no_such_input'"),
    ],
)
def test_what_is_refused_over_grpc(server: TritonServer, request_: dict[str, Any], message: str) -> None:
    with pytest.raises(InferenceServerException, match=re.escape(message)):
        ask(server, "tiny", {**PROMPT, **request_})


def test_what_asks_for_nothing_is_accepted(server: TritonServer) -> None:
    """The curl line of TensorRT-LLM's documentation sends these."""
    body = {**PROMPT, "max_tokens": 6, "bad_words": "", "stop_words": "", "pad_id": 2, "beam_width": 1}
    status, answer = generate(server, "tiny", body)
    assert (status, answer["finish_reason"]) == (200, "length")


def test_unary_grpc_is_refused_by_the_server(server: TritonServer, model: str) -> None:
    import tritonclient.grpc as grpcclient

    client = grpcclient.InferenceServerClient(server.grpc)
    with pytest.raises(InferenceServerException, match="decoupled transaction policy"):
        client.infer(model, tensors(client, model, PROMPT))


def cancel_grpc(server: TritonServer, model: str, request: dict[str, Any]) -> None:
    with grpc_stream(server, model, request) as responses:
        next(responses())


def cancel_grpc_deadline(server: TritonServer, model: str, request: dict[str, Any]) -> None:
    """Eight sequences, so that the request takes longer than the time it is given."""
    sampling = json.loads(request["sampling_parameters"]) | {"n": 8, "temperature": 1}
    request = {**request, "sampling_parameters": json.dumps(sampling)}
    with grpc_stream(server, model, request, stream_timeout=3) as responses, pytest.raises(InferenceServerException):
        list(responses())


def cancel_aio(server: TritonServer, model: str, request: dict[str, Any]) -> None:
    import tritonclient.grpc as grpcclient

    inputs = tensors(grpcclient.InferenceServerClient(server.grpc), model, request)

    async def run() -> None:
        async with aioclient.InferenceServerClient(server.grpc) as client:

            async def requests():  # type: ignore[no-untyped-def]
                yield {"model_name": model, "inputs": inputs}

            responses = client.stream_infer(requests())
            async for _ in responses:
                responses.cancel()
                break

    asyncio.run(run())


def cancel_http(server: TritonServer, model: str, request: dict[str, Any]) -> None:
    with open_stream(server, model, "generate_stream", request) as response:
        next(events(response))


@pytest.mark.parametrize("cancel", [cancel_grpc, cancel_grpc_deadline, cancel_aio, cancel_http])
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
    assert 0 < made < (8 if cancel is cancel_grpc_deadline else 1) * LONG["max_tokens"], (
        "it had its slots, and lost them"
    )


def test_a_timeout_ends_the_request(server: TritonServer, model: str) -> None:
    before = metric(server, "ddtree_requests_total", model, outcome="timeout")
    request = values(model, PROMPT["text_input"], stream=False, **LONG)
    _, answer = generate(server, model, {**request, "parameters": {"timeout": 100_000}})
    assert "the request's timeout of 100 ms passed after" in answer["error"]
    with pytest.raises(InferenceServerException, match="timeout of 100 ms passed"):
        ask(server, model, {**request, "stream": True}, timeout=100_000)
    assert eventually(lambda: metric(server, "ddtree_requests_total", model, outcome="timeout") == before + 2)
    assert idle(server, model)


def test_a_full_queue_is_said_at_once(server: TritonServer) -> None:
    """Eight slots and no queue: the ninth request is refused, and the others end as if nothing had been."""
    slots = int(metric(server, "ddtree_slots", "tiny-noqueue"))
    request = values("tiny-noqueue", PROMPT["text_input"], stream=True, **{**LONG, "max_tokens": 1000})
    truth = text(ask(server, "tiny-noqueue", request))
    texts: list[str] = []
    clients = [
        threading.Thread(target=lambda: texts.append(text(generate_stream(server, "tiny-noqueue", request))))
        for _ in range(slots)
    ]
    for client in clients:
        client.start()
    assert eventually(lambda: metric(server, "vllm:num_requests_running", "tiny-noqueue") == slots)
    with pytest.raises(InferenceServerException, match="try again later"):
        ask(server, "tiny-noqueue", request)
    for client in clients:
        client.join()
    assert texts == [truth] * slots
    assert eventually(lambda: metric(server, "ddtree_requests_total", "tiny-noqueue", outcome="overloaded") == 1)


def test_broken_models_say_why_and_the_others_serve(server: TritonServer) -> None:
    index = server.index()
    assert {name for name, model in index.items() if model["state"] == "READY"} == {"tiny", "tiny-vllm", "tiny-noqueue"}
    assert "weights.bin is damaged: its sha256 differs" in index["damaged"]["reason"]
    assert "was exported by ddtree-trt 99." in index["other-version"]["reason"]
