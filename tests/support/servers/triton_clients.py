"""Asking the server over its transports: HTTP `generate` and `generate_stream`, and gRPC streams."""

import json
import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from pacing import WAIT_S, wait_for

from tools.triton_server import TritonServer

# Slow on purpose: one token a round, and no end before the last token.
LONG: dict[str, Any] = {"max_tokens": 1900, "ignore_eos": True, "method": "ar"}


def values(model: str, prompt: str, *, stream: bool, **sampling: Any) -> dict[str, Any]:
    """A request in the model's layout: JSON keys of `generate`, or input tensors over gRPC."""
    request: dict[str, Any] = {"text_input": prompt, "stream": stream}
    if "vllm" in model:
        return {**request, "exclude_input_in_output": True, "sampling_parameters": json.dumps(sampling)}
    tensors = {"max_tokens", "temperature", "seed", "top_k", "top_p", "num_draft_tokens"}
    request |= {k: v for k, v in sampling.items() if k in tensors}
    return request | {"sampling_parameters": json.dumps({k: v for k, v in sampling.items() if k not in tensors})}


def generate(server: TritonServer, model: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a `generate` request."""
    with open_stream(server, model, "generate", body) as response:
        return response.status, json.loads(response.read())


def generate_stream(server: TritonServer, model: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The events of a `generate_stream` request."""
    with open_stream(server, model, "generate_stream", body) as response:
        return list(events(response))


def events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """Server-sent events as they come."""
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line[len(b"data: ") :])


@contextmanager
def open_stream(server: TritonServer, model: str, verb: str, body: Mapping[str, Any]) -> Iterator[HTTPResponse]:
    connection = HTTPConnection(server.http, timeout=WAIT_S)
    try:
        path = f"/v2/models/{model}/{verb}"
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        yield connection.getresponse()
    finally:
        connection.close()  # before the end: the client has gone away


def tensors(client: grpcclient.InferenceServerClient, model: str, request: Mapping[str, Any]) -> list[Any]:
    """Input tensors with the types and shapes the model declares."""
    metadata = client.get_model_metadata(model)
    declared = {i.name: i for i in metadata.inputs}
    batched = client.get_model_config(model).config.max_batch_size > 0
    inputs = []
    for name, value in request.items():
        datatype = declared[name].datatype if name in declared else "INT32"
        dtype = object if datatype == "BYTES" else grpcclient._utils.triton_to_np_dtype(datatype)
        items = [v.encode() if isinstance(v, str) else v for v in (value if isinstance(value, list) else [value])]
        array = np.array(items, dtype=dtype).reshape((1, -1) if batched else (-1,))
        inputs.append(grpcclient.InferInput(name, list(array.shape), datatype))
        inputs[-1].set_data_from_numpy(array)
    return inputs


@contextmanager
def grpc_stream(
    server: TritonServer, model: str, request: Mapping[str, Any], *, stream_timeout: float | None = None, **options: Any
) -> Iterator[Callable[[], Iterator[dict[str, Any]]]]:
    """Start a request on a stream of its own; the result yields the responses as they come, as {name: array}.

    Leaving the block before the last response cancels the request. Raises tritonclient's InferenceServerException.
    """
    client = grpcclient.InferenceServerClient(server.grpc)
    arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
    finished = False

    def responses() -> Iterator[dict[str, Any]]:
        nonlocal finished
        while not finished:
            result, error = arrived.get(timeout=WAIT_S)
            if error is not None:
                finished = True
                raise error
            response = result.get_response()
            finished = response.parameters["triton_final_response"].bool_param
            if response.outputs:
                yield {output.name: result.as_numpy(output.name) for output in response.outputs}

    client.start_stream(lambda result, error: arrived.put((result, error)), stream_timeout=stream_timeout)
    try:
        inputs = tensors(client, model, request)
        client.async_stream_infer(model, inputs, enable_empty_final_response=True, **options)
        yield responses
    finally:
        client.stop_stream(cancel_requests=not finished)
        client.close()


def ask(server: TritonServer, model: str, request: Mapping[str, Any], **options: Any) -> list[dict[str, Any]]:
    """All responses of a request over gRPC."""
    with grpc_stream(server, model, request, **options) as responses:
        return list(responses())


def text(responses: list[dict[str, Any]]) -> str:
    """The first sequence's text over all responses, of either transport."""
    return "".join(_first(r["text_output"]) for r in responses)


def _first(value: Any) -> str:
    item = value if isinstance(value, str) else value[0]
    return item.decode() if isinstance(item, bytes) else item


def metric(server: TritonServer, name: str, model: str, **labels: str) -> float:
    """Sum of a metric's samples of a model that carry the labels."""
    wanted = [f'{key}="{value}"' for key, value in {"model": model, **labels}.items()]
    samples = server.metrics().items()
    return sum(v for k, v in samples if k.startswith(f"{name}{{") and all(label in k for label in wanted))


def eventually(condition: Callable[[], bool]) -> bool:
    """True, once the condition is."""
    wait_for(condition)
    return True


def idle(server: TritonServer, model: str) -> bool:
    """Whether no sequence of the model holds a slot or waits for one."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return eventually(lambda: not any(metric(server, name, model) for name in names))
