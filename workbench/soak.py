"""Load a server with concurrent requests of every kind and check that none goes wrong.

    python -m workbench soak ENGINE_DIR --concurrency 200 --seconds 120

Asks every prompt once alone, then keeps `concurrency` requests under way: whole and streamed, greedy and sampled,
answers held to a JSON schema, calls of tools where the engine's chat template takes tools, clients that leave in the
middle, and wrong calls. Fails when an answer is an error, a greedy one is not what the prompt got alone, a slot or a
waiting place is not released, the resident memory grows, or the server does not end with exit code 0 on SIGTERM. Prints
the figures as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx

from ddtree_trt.bench.measure import load_prompts
from ddtree_trt.bench.settings import TINY
from workbench.options import started_server

GROWTH_BYTES = 16 << 20  # of resident memory, from the second quarter of the run to the last: the allocator's noise
_THING = {
    "type": "object",
    "properties": {"thing": {"enum": ["trays", "plates", "cards"]}, "number": {"type": "integer", "maximum": 999}},
    "required": ["thing", "number"],
    "additionalProperties": False,
}
_HELD_TOKENS = 120  # enough for the longest answer of the schema
KINDS: dict[str, dict[str, Any]] = {  # of requests, and their fields
    "whole": {},
    "streamed": {"stream": True},
    "sampled": {"stream": True, "temperature": 0.8, "top_p": 0.9},
    "leaving": {"stream": True, "max_tokens": 500, "ignore_eos": True},
    "wrong": {"temperature": -1},
    "schema": {
        "max_tokens": _HELD_TOKENS,
        "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": _THING}},
    },
    "tools": {
        "max_tokens": _HELD_TOKENS,
        "tools": [{"type": "function", "function": {"name": "count", "parameters": _THING}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
}
HELD = ("schema", "tools")  # that not every engine can serve
_GREEDY = ("whole", "streamed", *HELD)
_WEIGHTS = {"whole": 2, "streamed": 3}


@dataclass
class Report:
    """Everything a run measured."""

    seconds: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)  # finished, by kind
    errors: list[str] = field(default_factory=list)
    rss: list[float] = field(default_factory=list)  # resident bytes of the server, in equal steps
    most_running: float = 0
    tokens: float = 0  # generated under load
    left: float = 0  # requests running or waiting in the end

    def memory(self) -> tuple[float, float]:
        """Median resident bytes of the run's second and last quarters."""
        quarter = max(1, len(self.rss) // 4)
        return median(self.rss[quarter : 2 * quarter] or self.rss), median(self.rss[-quarter:])

    def to_json(self) -> str:
        return json.dumps({**vars(self), "rss": None, "rss_bytes": self.memory(), "failures": self.failures()})

    def failures(self) -> list[str]:
        """A sentence for each failure; empty when there was none."""
        before, after = self.memory()
        found = {
            f"{len(self.errors)} wrong answers, the first: {''.join(self.errors[:1])}": self.errors,
            f"{self.left:g} slots and waiting places were not given back": self.left,
            f"resident memory grew from {before:.0f} to {after:.0f} bytes": after - before > GROWTH_BYTES,
            "no request finished": not self.requests,
        }
        return [sentence for sentence, failed in found.items() if failed]


async def ask(client: httpx.AsyncClient, kind: str, prompt: str) -> str | None:
    """The text of an answer, or the arguments of its call; None where it is not read or the server refuses the kind.
    Raises AssertionError where it is none that the kind may have."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 48, **KINDS[kind]}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if kind == "leaving":
            await anext(answer.aiter_lines())
        else:
            await answer.aread()
    if answer.status_code == 400 and kind in (*HELD, "wrong"):
        assert answer.json()["error"]["param"] in KINDS[kind], answer.text
        return None
    assert answer.status_code == 200 and kind != "wrong", f"status {answer.status_code}"
    if kind == "leaving":
        return None
    if "stream" in KINDS[kind]:
        *events, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert done == "[DONE]", "the stream ended early"
        return "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events)
    choice = answer.json()["choices"][0]
    calls = [call["function"]["arguments"] for call in choice["message"].get("tool_calls") or ()]
    text = str(calls[0] if calls else choice["message"]["content"])
    if kind in HELD and choice["finish_reason"] != "length":  # which a model that reasons may reach
        assert {type(value) for value in json.loads(text).values()} == {str, int}, f"not of the schema: {text!r}"
    return text


async def _figures(client: httpx.AsyncClient) -> dict[str, float]:
    page = (await client.get("/metrics")).text
    lines = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name.partition("{")[0]: float(value) for name, _, value in lines}


async def load(url: str, concurrency: int, seconds: float, prompts: Sequence[str], seed: int) -> Report:
    """The report on a server at `url` under load."""
    limits = httpx.Limits(max_connections=concurrency + 1, max_keepalive_connections=concurrency + 1)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        alone = {
            (kind, p): await ask(client, kind, p) for kind in _GREEDY for p in prompts[: 4 if kind in HELD else None]
        }
        offered = [kind for kind in KINDS if kind not in HELD or any(alone[kind, p] is not None for p in prompts[:4])]
        weights = [_WEIGHTS.get(kind, 1) for kind in offered]
        report, before, start = Report(), await _figures(client), time.monotonic()

        async def worker(number: int) -> None:
            rng = random.Random(seed * 1000 + number)
            while time.monotonic() < start + seconds:
                (kind,) = rng.choices(offered, weights)
                prompt = rng.choice(prompts[: 4 if kind in HELD else None])
                try:
                    answer = await ask(client, kind, prompt)
                    expected = alone.get((kind, prompt), answer)
                    assert answer == expected, f"{prompt!r} got {answer!r}, alone {expected!r}"
                except (httpx.HTTPError, AssertionError, LookupError, ValueError) as error:
                    report.errors.append(f"{kind}: {type(error).__name__}: {error}"[:300])
                report.requests[kind] += 1

        async def watch() -> None:
            while True:
                figures = await _figures(client)
                report.rss.append(figures["process_resident_memory_bytes"])
                report.most_running = max(report.most_running, figures["vllm:num_requests_running"])
                await asyncio.sleep(min(1.0, seconds / 20))

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(worker(i) for i in range(concurrency)))
        report.seconds = time.monotonic() - start
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        for _ in range(600):  # a minute, and more on a busy machine
            after = await _figures(client)
            report.left = after["vllm:num_requests_running"] + after["vllm:num_requests_waiting"]
            if not report.left:
                break
            await asyncio.sleep(0.1)
        report.tokens = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    return report


def run(engine: str, concurrency: int, seconds: float, *, prompts: int = 24, seed: int = 0) -> Report:
    """Start a server, load it and stop it; the report. Raises DDTreeError where it does not start or end well."""
    chosen = [prompt.opening[0]["content"] for prompt in load_prompts([TINY], prompts)]  # type: ignore[index]
    with started_server(engine, "--no-request-log") as url:
        return asyncio.run(load(url, concurrency, seconds, chosen, seed))


def main(engine: str, concurrency: int = 200, seconds: float = 120, seed: int = 0) -> None:
    report = run(engine, concurrency, seconds, seed=seed)
    print(report.to_json())
    raise SystemExit(bool(report.failures()))
