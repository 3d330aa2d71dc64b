"""Compare an engine behind Triton with the same engine without a server: latency per token and throughput.

    make bench-triton          (ENGINE=DIR for another engine than the tiny one)

The clients are interleaved, so that a slow moment of the machine affects all of them, and the median is printed.
Everything runs on this machine. "processor" is the time of the client, the server and the model's process together.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.triton.export import ExportRequest, export_triton

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tools.triton_server import TritonServer

PROMPTS = Path(__file__).resolve().parents[1] / "ddtree_trt" / "assets" / "tiny" / "prompts.jsonl"
# A fixed budget gives all clients the same trees; automatic ones depend on measured times.
SAMPLING: dict[str, Any] = {"ignore_eos": True, "tree_budget": 8}
Sizes = Iterator[int]  # tokens of each response, as they come
Ask = Callable[[list[str], int], list["Stream"]]


@dataclass(frozen=True)
class Stream:
    """Times and sizes of one streamed answer."""

    first_s: float  # until the first response
    total_s: float
    tokens: int
    responses: int


def watch(sizes: Sizes) -> Stream:
    """Read an answer to its end."""
    started = time.perf_counter()
    first, tokens, responses = 0.0, 0, 0
    for size in sizes:
        first = first or time.perf_counter() - started
        tokens, responses = tokens + size, responses + 1
    return Stream(first, time.perf_counter() - started, tokens, responses)


def direct(llm: LLM) -> Ask:
    """A client of `LLM.stream` that reads the streams in turn."""

    def ask(prompts: list[str], tokens: int) -> list[Stream]:
        started = time.perf_counter()
        params = SamplingParams(max_tokens=tokens, **SAMPLING)
        running = {i: llm.stream(prompt, params) for i, prompt in enumerate(prompts)}
        first, counts, responses = [0.0] * len(prompts), [0] * len(prompts), [0] * len(prompts)
        ended = [0.0] * len(prompts)
        while running:
            for i, stream in list(running.items()):
                part = next(stream, None)
                now = time.perf_counter() - started
                if part is None:
                    ended[i] = now
                    del running[i]
                    continue
                first[i] = first[i] or now
                counts[i] += len(part.outputs[0].token_ids)
                responses[i] += 1
        return [Stream(*figures) for figures in zip(first, ended, counts, responses, strict=True)]

    return ask


def at_once(read: Callable[[str, int], Sizes]) -> Ask:
    """A client that reads every stream in a thread of its own."""

    def ask(prompts: list[str], tokens: int) -> list[Stream]:
        streams: list[Stream] = []
        threads = [threading.Thread(target=lambda p=p: streams.append(watch(read(p, tokens)))) for p in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return streams

    return ask


def over_grpc(server: TritonServer) -> Ask:
    def read(prompt: str, tokens: int) -> Sizes:
        values = {
            "text_input": (np.array([[prompt.encode()]], dtype=object), "BYTES"),
            "max_tokens": (np.array([[tokens]], np.int32), "INT32"),
            "stream": (np.array([[True]]), "BOOL"),
            "return_num_output_tokens": (np.array([[True]]), "BOOL"),
            "sampling_parameters": (np.array([[json.dumps(SAMPLING).encode()]], dtype=object), "BYTES"),
        }
        inputs = []
        for name, (array, kind) in values.items():
            inputs.append(grpcclient.InferInput(name, list(array.shape), kind))
            inputs[-1].set_data_from_numpy(array)
        arrived: queue.Queue[tuple[grpcclient.InferResult, Exception | None]] = queue.Queue()
        client = grpcclient.InferenceServerClient(server.grpc)
        assert client.is_server_live()  # and connected, which is not what is measured
        client.start_stream(lambda result, error: arrived.put((result, error)))

        def sizes() -> Sizes:
            client.async_stream_infer("bench", inputs)
            seen = 0
            while seen < tokens:
                result, error = arrived.get(timeout=60)
                if error is not None:
                    raise error
                size = int(result.as_numpy("num_output_tokens").item())
                seen += size
                yield size
            client.close()

        return sizes()

    return at_once(read)


def over_http(server: TritonServer) -> Ask:
    def read(prompt: str, tokens: int) -> Sizes:
        body = {"text_input": prompt, "max_tokens": tokens, "stream": True, "return_num_output_tokens": True}
        text = json.dumps({**body, "parameters": SAMPLING})
        connection = http.client.HTTPConnection(server.http, timeout=60)
        connection.connect()

        def sizes() -> Sizes:
            connection.request("POST", "/v2/models/bench/generate_stream", text, {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])["num_output_tokens"]
            connection.close()

        return sizes()

    return at_once(read)


def forwarding(server: TritonServer) -> tuple[float, float, float]:
    """Processor seconds, wall seconds and number of the responses our model has sent so far."""
    time.sleep(0.2)  # until the last figures are out
    samples = server.metrics()
    names = ("forward_cpu_seconds", "forward_seconds", "responses")
    cpu, wall, count = (sum(v for k, v in samples.items() if k.startswith(f"ddtree_{n}_total")) for n in names)
    return cpu, wall, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path, nargs="?", help="an engine directory; without one the tiny pair is built")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = options.engine or Path(folder) / "tiny"
        if options.engine is None:
            compile_engine(BuildRequest(target="tiny", output=engine))
        with LLM(engine) as llm:
            export_triton(ExportRequest(engine, Path(folder) / "models", "bench", link=True))
            with TritonServer(Path(folder) / "models") as server:
                compare(llm, server, options)


def compare(llm: LLM, server: TritonServer, options: argparse.Namespace) -> None:
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    ways = {"LLM.stream": direct(llm), "Triton gRPC": over_grpc(server), "Triton HTTP": over_http(server)}
    print(f"{llm.engine.manifest.name}, {options.tokens} tokens a stream, median of {options.repeats}, ", end="")
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}\n")
    columns = ("ms per token", "first response, ms", "tokens/s", "processor, ms per token", "tokens per response")
    print(f"| streams | way | {' | '.join(columns)} |")
    print(f"|---:|---|{'---:|' * len(columns)}")
    for ask in ways.values():
        ask(prompts[:1], options.tokens)  # warm
    spent = []
    for count in options.streams:
        rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
        before = forwarding(server)
        for repeat in range(options.repeats):
            chosen = [prompts[(repeat * count + i) % len(prompts)] for i in range(count)]
            for name, ask in ways.items():
                used = time.process_time() + server.processor_s()
                streams = ask(chosen, options.tokens)
                used = time.process_time() + server.processor_s() - used
                tokens = sum(s.tokens for s in streams)
                assert tokens == count * options.tokens, f"{name}: {tokens} tokens"
                rows[name].append(
                    (
                        median(s.total_s / s.tokens for s in streams) * 1e3,
                        median(s.first_s for s in streams) * 1e3,
                        tokens / max(s.total_s for s in streams),
                        used / tokens * 1e3,
                        tokens / sum(s.responses for s in streams),
                    )
                )
        for name, figures in rows.items():
            per_token, first, rate, used, size = (median(column) for column in zip(*figures, strict=True))
            print(f"| {count} | {name} | {per_token:.2f} | {first:.1f} | {rate:.0f} | {used:.2f} | {size:.2f} |")
        spent.append((count, *(after - b for after, b in zip(forwarding(server), before, strict=True))))
    print("\n| streams | in our model, processor ms per response | wall ms per response | responses |")
    print("|---:|---:|---:|---:|")
    for count, cpu, wall, responses in spent:
        print(f"| {count} | {cpu / responses * 1e3:.3f} | {wall / responses * 1e3:.3f} | {responses:.0f} |")


if __name__ == "__main__":
    main()
