"""Load a server with concurrent requests of every kind and check that none goes wrong.

    python tools/load_test.py ENGINE_DIR --concurrency 200 --seconds 120

Starts `ddtree-trt serve` on a free loopback port, asks every prompt once alone, then keeps `concurrency` requests under
way: whole and streamed, greedy and sampled, answers held to a JSON schema, calls of tools where the engine's chat
template takes tools, clients that leave in the middle, and wrong calls. Fails when an answer is an error, a greedy one
is not what the prompt got alone, one that is held to a schema does not satisfy it, a slot or a waiting place is not
released, the resident memory grows, or the server does not end with exit code 0 on SIGTERM. Prints the figures as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import ddtree_trt

PROMPTS_FILE = Path(ddtree_trt.__file__).parent / "assets" / "tiny" / "prompts.jsonl"
MAX_CONCURRENCY, MAX_SECONDS, MAX_REQUESTS = 512, 600, 200_000
MAX_TOKENS = 48
GROWTH_BYTES = 16 << 20  # of resident memory, from the second quarter of the run to the last: the allocator's noise
KINDS = ("whole", "whole", "streamed", "streamed", "streamed", "sampled", "leaving", "wrong")
THING = {
    "type": "object",
    "properties": {"thing": {"enum": ["trays", "plates", "cards"]}, "number": {"type": "integer", "maximum": 999}},
    "required": ["thing", "number"],
    "additionalProperties": False,
}
# Requests that not every engine can serve, with their fields; both are greedy.
HELD: dict[str, dict[str, Any]] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": THING}}},
    "tools": {
        "tools": [{"type": "function", "function": {"name": "count", "parameters": THING}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
}
HELD_PROMPTS = 4
HELD_TOKENS = 120  # enough for the longest answer of the schema


@dataclass
class Report:
    """Everything a run measured."""

    concurrency: int
    seconds: float
    requests: Counter[str] = field(default_factory=Counter)  # finished, by kind
    errors: list[str] = field(default_factory=list)
    samples: list[tuple[float, float, float, float]] = field(default_factory=list)  # time, RSS bytes, running, waiting
    tokens: float = 0  # generated under load
    left_running: float = 0
    left_waiting: float = 0
    exit_code: int | None = None

    def memory(self) -> tuple[float, float]:
        """Median resident bytes of the run's second and last quarters."""
        rss = [s[1] for s in self.samples]
        quarter = max(1, len(rss) // 4)
        return statistics.median(rss[quarter : 2 * quarter] or rss), statistics.median(rss[-quarter:])

    def failures(self) -> list[str]:
        """A sentence for each failure; empty when there was none."""
        found = [f"{len(self.errors)} wrong answers, the first: {self.errors[0]}"] if self.errors else []
        if self.left_running or self.left_waiting:
            found.append(f"{self.left_running:g} slots and {self.left_waiting:g} waiting places were not given back")
        before, after = self.memory()
        if after - before > GROWTH_BYTES:
            found.append(f"resident memory grew from {before:.0f} to {after:.0f} bytes")
        if self.exit_code != 0:
            found.append(f"the server ended with exit code {self.exit_code}")
        if not sum(self.requests.values()):
            found.append("no request finished")
        return found

    def summary(self) -> dict[str, Any]:
        before, after = self.memory()
        return {
            "seconds": round(self.seconds, 1),
            "requests_by_kind": dict(sorted(self.requests.items())),
            "tokens": self.tokens,
            "most_running": max(s[2] for s in self.samples),
            "most_waiting": max(s[3] for s in self.samples),
            "rss_bytes": [before, after],  # of the second and the last quarter
            "failures": self.failures(),
        }


class Load:
    """Clients that ask a server at random, and check its answers."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        report: Report,
        texts: dict[str, str],
        held: dict[str, dict[str, str]],
        end: float,
        seed: int,
    ) -> None:
        """`texts`: prompt → the answer it got alone; `held`: kind of `HELD` → prompt → the answer it got alone."""
        self._client = client
        self._report = report
        self._texts = texts
        self._held = held
        self._kinds = KINDS + tuple(held)
        self._prompts = sorted(texts)
        self._end = end
        self._seed = seed

    async def worker(self, number: int) -> None:
        """Send one request after another until the time is over."""
        rng = random.Random(self._seed * 1000 + number)
        while time.monotonic() < self._end and sum(self._report.requests.values()) < MAX_REQUESTS:
            kind, prompt = rng.choice(self._kinds), rng.choice(self._prompts)
            try:
                await getattr(self, f"_{kind}")(prompt)
            except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
                self._report.errors.append(f"{kind}: {type(error).__name__}: {error}"[:300])
            self._report.requests.update([kind])

    async def _whole(self, prompt: str) -> None:
        answer = await ask(self._client, prompt)
        assert answer == self._texts[prompt], f"another text for {prompt!r}: {answer!r}"

    async def _streamed(self, prompt: str) -> None:
        text = await self._stream(prompt)
        assert text == self._texts[prompt], f"another text for {prompt!r}: {text!r}"

    async def _sampled(self, prompt: str) -> None:
        await self._stream(prompt, temperature=0.8, top_p=0.9)

    async def _stream(self, prompt: str, **fields: Any) -> str:
        text, complete = "", False
        async with self._client.stream("POST", "/v1/chat/completions", json=body(prompt, stream=True, **fields)) as r:
            assert r.status_code == 200, f"status {r.status_code}: {await r.aread()!r}"
            async for line in r.aiter_lines():
                if line == "data: [DONE]":
                    complete = True
                elif line:
                    delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                    text += delta.get("content", "")
        assert complete, "the stream ended early"
        return text

    async def _schema(self, prompt: str) -> None:
        await self._ask_held("schema", prompt)

    async def _tools(self, prompt: str) -> None:
        await self._ask_held("tools", prompt)

    async def _ask_held(self, kind: str, prompt: str) -> None:
        alone = self._held[kind]
        prompt = sorted(alone)[len(prompt) % len(alone)]
        answer = await ask_held(self._client, kind, prompt)
        assert answer == alone[prompt], f"another answer for {prompt!r}: {answer!r}"

    async def _leaving(self, prompt: str) -> None:
        fields = {"stream": True, "max_tokens": 500, "ignore_eos": True}
        async with self._client.stream("POST", "/v1/chat/completions", json=body(prompt, **fields)) as r:
            assert r.status_code == 200, f"status {r.status_code}"
            await anext(r.aiter_lines())

    async def _wrong(self, prompt: str) -> None:
        r = await self._client.post("/v1/chat/completions", json=body(prompt, temperature=-1))
        assert r.status_code == 400 and r.json()["error"]["param"] == "temperature", r.text


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": MAX_TOKENS, **fields}


async def ask(client: httpx.AsyncClient, prompt: str) -> str:
    r = await client.post("/v1/chat/completions", json=body(prompt))
    assert r.status_code == 200, f"status {r.status_code}: {r.text}"
    return str(r.json()["choices"][0]["message"]["content"])


async def ask_held(client: httpx.AsyncClient, kind: str, prompt: str) -> str | None:
    """The JSON that an answer consists of, or the arguments of its call; None where the server does not offer it."""
    r = await client.post("/v1/chat/completions", json=body(prompt, **HELD[kind]) | {"max_tokens": HELD_TOKENS})
    if r.status_code == 400 and r.json()["error"]["param"] in HELD[kind]:
        return None
    assert r.status_code == 200, f"status {r.status_code}: {r.text}"
    choice = r.json()["choices"][0]
    if choice["finish_reason"] == "length":  # a model that reasons
        return str(choice["message"]["content"])
    (text,) = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", [])] or [
        choice["message"]["content"]
    ]
    assert {type(value) for value in json.loads(text).values()} == {str, int}, f"not of the schema: {text!r}"
    return str(text)


async def held_alone(client: httpx.AsyncClient, prompts: list[str]) -> dict[str, dict[str, str]]:
    """Kind of `HELD` that the server offers → prompt → the answer it gets alone."""
    found: dict[str, dict[str, str]] = {}
    for kind in HELD:
        answers = {prompt: await ask_held(client, kind, prompt) for prompt in prompts[:HELD_PROMPTS]}
        kept = {prompt: answer for prompt, answer in answers.items() if answer is not None}
        if kept:
            found[kind] = kept
    return found


async def figures(client: httpx.AsyncClient) -> dict[str, float]:
    page = (await client.get("/metrics")).text
    return {k: float(v) for k, _, v in (x.rpartition(" ") for x in page.splitlines() if not x.startswith("#"))}


async def watch(client: httpx.AsyncClient, report: Report, every_s: float) -> None:
    start = time.monotonic()
    while True:
        m = await figures(client)
        running, waiting = m["vllm:num_requests_running"], m["vllm:num_requests_waiting"]
        report.samples.append((time.monotonic() - start, m["process_resident_memory_bytes"], running, waiting))
        await asyncio.sleep(every_s)


async def load(url: str, concurrency: int, seconds: float, prompts: list[str], seed: int) -> Report:
    """The report on a server at `url` under load, without its exit code."""
    limits = httpx.Limits(max_connections=concurrency + 1, max_keepalive_connections=concurrency + 1)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        texts = {prompt: await ask(client, prompt) for prompt in prompts}
        held = await held_alone(client, prompts)
        report, before, start = Report(concurrency, seconds), await figures(client), time.monotonic()
        watcher = asyncio.create_task(watch(client, report, min(1.0, seconds / 20)))
        under_load = Load(client, report, texts, held, start + seconds, seed)
        await asyncio.gather(*(under_load.worker(i) for i in range(concurrency)))
        report.seconds = time.monotonic() - start
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
        for _ in range(600):  # a minute, and more on a busy machine
            after = await figures(client)
            report.left_running, report.left_waiting = (
                after["vllm:num_requests_running"],
                after["vllm:num_requests_waiting"],
            )
            if not (report.left_running or report.left_waiting):
                break
            await asyncio.sleep(0.1)
        report.tokens = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    return report


def run(engine_dir: Path, concurrency: int, seconds: float, *, prompts: int = 24, seed: int = 0) -> Report:
    """Start a server, load it and stop it; the report."""
    lines = PROMPTS_FILE.read_text(encoding="utf-8").splitlines()
    chosen = [json.loads(line)["prompt"] for line in lines][:prompts]
    command = [sys.executable, "-m", "ddtree_trt", "serve", str(engine_dir), "--port", "0", "--no-request-log"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            if not (ready := server.stdout.readline()):
                raise SystemExit("the server did not start")
            report = asyncio.run(load(ready.split()[-1], concurrency, seconds, chosen, seed))
            server.send_signal(signal.SIGTERM)
            report.exit_code = server.wait(120)
        finally:
            if server.poll() is None:
                server.kill()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine_dir", type=Path)
    parser.add_argument("--concurrency", type=int, default=200, help=f"1 to {MAX_CONCURRENCY}")
    parser.add_argument("--seconds", type=float, default=120, help=f"up to {MAX_SECONDS}")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not (1 <= options.concurrency <= MAX_CONCURRENCY and 0 < options.seconds <= MAX_SECONDS):
        parser.error(f"--concurrency is 1 to {MAX_CONCURRENCY}, --seconds up to {MAX_SECONDS}")
    report = run(options.engine_dir, options.concurrency, options.seconds, seed=options.seed)
    print(json.dumps(report.summary(), indent=1))
    sys.exit(1 if report.failures() else 0)
