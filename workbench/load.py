"""Measure a server under load: throughput and latencies against concurrent requests or their rate, beside ar.

    python -m workbench load --url http://127.0.0.1:8000 --concurrency 1,4,16,64 [--json FILE]
    python -m workbench load --engine engines/tiny --rate 1,2,4        # starts a server of its own, and ends it

Closed loop (--concurrency): so many clients, each of which sends its next request when the last one is answered. Open
loop (--rate): requests arrive independently of each other (Poisson), whether or not others have been answered. Every
level runs with each method, asked of the same server request by request; `default` names none. With --long 2000 one
more client sends prompts of so many tokens, one after another: the longest pause of a stream is told in chunks of such
a prompt, timed alone. The server's key is read from DDTREE_API_KEY or OPENAI_API_KEY.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from numpy.typing import NDArray

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.bench.measure import BenchPrompt, describe_environment, load_prompts
from ddtree_trt.bench.report import table
from ddtree_trt.bench.settings import TINY
from ddtree_trt.commands.arguments import with_options
from ddtree_trt.errors import DDTreeError, UsageError
from ddtree_trt.records import option
from ddtree_trt.terminal.printing import progress_bars
from workbench.options import Json, integers, numbers, started_server

_TIMEOUT_S = 3600.0  # of one read: requests of an overloaded server wait long for their first token
_MESSAGE_CHARACTERS = 300


@dataclass(frozen=True)
class Sent:
    """A request as it went. Times are seconds since the start of its level."""

    due_s: float  # when it was to be sent; later times count from here, so a client that is late is no better off
    first_s: float | None = None  # first text
    last_s: float | None = None  # last text
    gap_s: float | None = None  # longest time between two texts
    tokens: int = 0  # by the server's count
    rounds: int = 0  # of speculative decoding that verified drafts, where the server reports it
    accepted: int = 0  # draft tokens accepted in them
    error: str | None = None

    @property
    def first_token_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def whole_s(self) -> float | None:
        return None if self.last_s is None else self.last_s - self.due_s

    @property
    def per_token_s(self) -> float | None:
        """Mean time of the tokens after the first."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)


class Client:
    """A connection pool to one server. Use with `async with client.http`."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """`url`: with or without /v1. Raises UsageError where it is none."""
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {} if not api_key else {"Authorization": f"Bearer {api_key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        try:
            self.http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=_TIMEOUT_S, limits=limits)
        except httpx.InvalidURL as error:
            raise UsageError(f"--url must be a URL such as http://localhost:8000, not {url!r}: {error}") from error

    async def model(self) -> str:
        """The name of the first model that the server has. Raises DDTreeError where none can be had."""
        try:
            answer = await self.http.get("/v1/models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise DDTreeError(
                f"no model is served at {self.url}: {error or type(error).__name__}; is it up?"
            ) from error

    async def send(self, prompt: BenchPrompt, fields: dict[str, Any], due_s: float, started: float) -> Sent:
        """Send a prompt's opening and read the answer. `started`: time.perf_counter() of the level's start."""
        body = {**fields, "stream": True, "stream_options": {"include_usage": True}}
        if isinstance(prompt.opening, list) and isinstance(prompt.opening[0], dict):
            path, body["messages"] = "/v1/chat/completions", prompt.opening
        else:
            path, body["prompt"] = "/v1/completions", prompt.opening
        marks: dict[str, Any] = {}
        try:
            async with self.http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode("utf-8", "replace")
                    return Sent(due_s, error=f"HTTP {answer.status_code}: {_message(text)}"[:_MESSAGE_CHARACTERS])
                async for line in answer.aiter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        _note(json.loads(data), time.perf_counter() - started, marks)
        except (httpx.HTTPError, ValueError) as error:
            return Sent(due_s, error=f"{type(error).__name__}: {error}"[:_MESSAGE_CHARACTERS])
        if "error" not in marks and "tokens" not in marks:
            marks["error"] = "the stream ended without usage (stream_options.include_usage)"
        return Sent(due_s, **marks)


def _message(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body


def _note(event: dict[str, Any], now_s: float, marks: dict[str, Any]) -> None:
    """Add what an event says to the fields of `Sent`."""
    if "error" in event:
        marks["error"] = _message(json.dumps(event))[:_MESSAGE_CHARACTERS]
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")):
            marks.setdefault("first_s", now_s)
            if "last_s" in marks:
                marks["gap_s"] = max(marks.get("gap_s", 0.0), now_s - marks["last_s"])
            marks["last_s"] = now_s
    if usage := event.get("usage"):
        stats = (event.get("metrics") or {}).get("speculative_decoding") or {}
        marks["tokens"] = usage["completion_tokens"]
        marks["rounds"] = stats.get("num_spec_steps", 0)
        marks["accepted"] = stats.get("num_accepted_draft_tokens", 0)


PERCENTILES = (50, 90, 99)
LATENCIES = ("first_token_s", "per_token_s", "gap_s", "whole_s")
LEGEND = (
    "p50 / p90 / p99 of the answered requests, as their clients saw them; a request of an open loop counts from the "
    "time it was due. τ: tokens of a round that verified drafts."
)
_FIGURES = "tokens/s,over ar,requests/s,first token ms,per token ms,longest gap ms,whole ms,τ,answered".split(",")


@dataclass(frozen=True)
class Level:
    """How much load: a number of clients that always have a request under way (closed loop), or a rate at which
    requests arrive, whether or not others have been answered (open loop)."""

    concurrency: int | None = None
    rate: float | None = None  # requests per second

    @property
    def load(self) -> float:
        return float(self.concurrency or self.rate or 0)

    def __str__(self) -> str:
        return f"{self.concurrency} concurrent" if self.rate is None else f"{self.rate:g} requests/s"


@dataclass(frozen=True)
class Run:
    """One method at one level."""

    level: Level
    method: str
    seconds: float  # from the first request's time to the last answer's end
    sent: tuple[Sent, ...]
    chunk_s: float | None = None  # what a chunk of a long prompt took alone, where such prompts were sent beside these

    @property
    def answered(self) -> list[Sent]:
        return [s for s in self.sent if s.error is None]

    @property
    def tokens_per_s(self) -> float:
        return sum(s.tokens for s in self.answered) / self.seconds

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens of a round that verified drafts, the bonus token included; None where the server drafted none, or
        says nothing of it."""
        rounds = sum(s.rounds for s in self.answered)
        return 1 + sum(s.accepted for s in self.answered) / rounds if rounds else None

    @property
    def longest_gap_s(self) -> float:
        """Of all streams."""
        return max((s.gap_s for s in self.answered if s.gap_s is not None), default=0.0)

    @property
    def errors(self) -> dict[str, int]:
        """The errors, by how many requests had each."""
        return dict(Counter(s.error for s in self.sent if s.error is not None))

    def latency(self, name: str) -> tuple[float, ...] | None:
        """p50, p90 and p99 of one of LATENCIES, in seconds; None where no answer has it."""
        known = [value for s in self.answered if (value := getattr(s, name)) is not None]
        return tuple(np.percentile(known, PERCENTILES).tolist()) if known else None


@dataclass(frozen=True)
class LoadResult:
    """A whole measurement."""

    url: str
    model: str
    environment: Mapping[str, Any]  # of the client; the server's too where it was started here
    runs: tuple[Run, ...]


def figures(run: Run) -> dict[str, Any]:
    return {
        "level": asdict(run.level),
        "answered": len(run.answered),
        "output_tokens_per_s": run.tokens_per_s,
        "requests_per_s": len(run.answered) / run.seconds,
        **{name: getattr(run, name) for name in ("method", "seconds", "errors", "chunk_s")},
        **{name: getattr(run, name) for name in ("acceptance_length", "longest_gap_s")},
        **{name: run.latency(name) for name in LATENCIES},
    }


def text(result: LoadResult) -> str:
    """The table, and what belongs to it: the server, the machine, and the errors of each run."""
    env = result.environment
    notes = [
        f"{result.model} at {result.url}",
        f"client on {env['machine']}, load {env['load_1min']} at the end; ddtree-trt {env['version']}",
        *(
            f"{r.level}, {r.method}: beside long prompts no stream paused longer than {1000 * r.longest_gap_s:.0f} ms, "
            f"{r.longest_gap_s / r.chunk_s:.1f} times a chunk of {1000 * r.chunk_s:.0f} ms"
            for r in result.runs
            if r.chunk_s
        ),
        *(f"{r.level}, {r.method}: {count} × {error}" for r in result.runs for error, count in r.errors.items()),
    ]
    baseline, lines = {run.level: run.tokens_per_s for run in result.runs if run.method == "ar"}, []

    def milliseconds(times: tuple[float, ...] | None, digits: int) -> str:
        return "–" if times is None else " / ".join(f"{1000 * value:.{digits}f}" for value in times)

    for run in result.runs:
        length, base = run.acceptance_length, baseline.get(run.level)
        cells = [
            str(run.level),
            run.method,
            f"{run.tokens_per_s:.0f}",
            "–" if not base else f"{run.tokens_per_s / base:.2f}×",
            f"{len(run.answered) / run.seconds:.2f}",
            *(milliseconds(run.latency(name), 2 if name == "per_token_s" else 0) for name in LATENCIES),
            "–" if length is None else f"{length:.2f}",
            f"{len(run.answered)}/{len(run.sent)}",
        ]
        lines.append(cells)
    rows = table(["load", "method", *_FIGURES], lines)
    return "\n".join([*rows, "", LEGEND, "", *(f"- {note}" for note in notes), ""])


DEFAULT_METHOD, BASELINE = "default", "ar"
CHUNK = Limits.prefill_chunk
_Send = Callable[[int, float, float], Awaitable[Sent]]  # number of the request, its time, the level's start


@dataclass(frozen=True)
class LoadSettings:
    """What is asked."""

    concurrency: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    methods: tuple[str, ...] = (DEFAULT_METHOD, BASELINE)
    requests: int | None = option(None, "Of each level and method. Default: 4 a client, 24 at least.")
    prompts: tuple[str, ...] = option((TINY,), "As in ddtree-trt bench; repeatable.", "FILE")
    limit: int | None = option(None, "Prompts per set, evenly spaced. Default: all.")
    max_tokens: int = option(128, "New tokens of a request.")
    long: int | None = option(None, "Tokens of long prompts that one more client sends beside each level.", "N")
    temperature: float = option(0.0, "Of every request.", "T")
    seed: int = option(0, "Of the arrivals, the order of prompts and the requests.")

    @property
    def levels(self) -> tuple[Level, ...]:
        return tuple(Level(concurrency=c) for c in self.concurrency) + tuple(Level(rate=r) for r in self.rates)

    def requests_at(self, level: Level) -> int:
        return max(self.requests or max(24, 4 * (level.concurrency or 0)), level.concurrency or 1)


def poisson_arrivals(rate: float, count: int, seed: int) -> NDArray[np.float64]:
    """Seconds from the start at which `count` independent requests arrive, `rate` per second on average: float64
    [count], rising. One seed gives the same arrivals everywhere, and at another rate the same ones scaled."""
    return np.cumsum(np.random.default_rng(seed).exponential(size=count)) / rate


def run_load(settings: LoadSettings, url: str, progress: Progress = no_progress) -> LoadResult:
    """Measure the server at a URL. Raises UsageError for unknown prompts and where nothing is asked, DDTreeError where
    the server cannot be used or answers no request of a run."""
    if not settings.levels or min(level.load for level in settings.levels) <= 0:
        raise UsageError("give numbers of concurrent requests with --concurrency, or rates with --rate, above 0")
    prompts = load_prompts(settings.prompts, settings.limit)
    random.Random(settings.seed).shuffle(prompts)
    return asyncio.run(_measure(settings, url, prompts, progress))


async def _measure(settings: LoadSettings, url: str, prompts: list[BenchPrompt], progress: Progress) -> LoadResult:
    key = os.environ.get("DDTREE_API_KEY") or os.environ.get("OPENAI_API_KEY")
    total = sum(settings.requests_at(level) for level in settings.levels) * len(settings.methods)
    done = itertools.count(1)
    runs: list[Run] = []
    client = Client(url, key)
    async with client.http:
        model = await client.model()

        async def ask(
            method: str, number: int, due_s: float, started: float, prompt: BenchPrompt | None = None, **more: Any
        ) -> Sent:
            fields = {"model": model, "max_tokens": settings.max_tokens, "temperature": settings.temperature}
            fields |= {"seed": settings.seed + number, **more}
            if method != DEFAULT_METHOD:
                fields["method"] = method
            return await client.send(prompt or prompts[number % len(prompts)], fields, due_s, started)

        ids = np.random.default_rng(settings.seed)

        async def ask_long(method: str) -> Sent:
            prompt = BenchPrompt("long", "long", ids.integers(100, 1000, settings.long).tolist())
            return await ask(method, 0, 0.0, time.perf_counter(), prompt, max_tokens=1)

        chunks: dict[str, float | None] = {}
        for method in settings.methods:  # not measured: the first request of a kind takes longer
            warm = await ask(method, 0, 0.0, time.perf_counter())
            begun = time.perf_counter()
            long = await ask_long(method) if settings.long else warm
            spent = time.perf_counter() - begun
            if (error := warm.error or long.error) is not None:
                raise DDTreeError(f"{client.url} refused a request with method {method}: {error}")
            chunks[method] = spent / math.ceil(settings.long / CHUNK) if settings.long else None
        for place, level in enumerate(settings.levels):
            # In turn the first: what a level leaves in the server's caches is not always one method's.
            for method in settings.methods if place % 2 == 0 else reversed(settings.methods):

                async def send(number: int, due_s: float, started: float, method: str = method) -> Sent:
                    sent = await ask(method, number, due_s, started)
                    progress("requests", next(done), total)
                    return sent

                async def disturb(method: str = method) -> None:
                    while settings.long:
                        if error := (await ask_long(method)).error:
                            raise DDTreeError(f"{client.url} refused a long prompt with method {method}: {error}")

                beside = asyncio.create_task(disturb())
                run = await _run(settings, level, method, send)
                beside.cancel()
                with suppress(asyncio.CancelledError):
                    await beside
                runs.append(replace(run, chunk_s=chunks[method]))
    runs.sort(key=lambda run: (settings.levels.index(run.level), settings.methods.index(run.method)))
    return LoadResult(client.url, model, describe_environment(), tuple(runs))


async def _run(settings: LoadSettings, level: Level, method: str, send: _Send) -> Run:
    count, started = settings.requests_at(level), time.perf_counter()
    sent: dict[int, Sent] = {}
    numbers = iter(range(count))

    async def client() -> None:
        """Sends its next request when the one before has ended."""
        for number in numbers:
            sent[number] = await send(number, time.perf_counter() - started, started)

    async def arrival(number: int, due_s: float) -> None:
        await asyncio.sleep(max(0.0, due_s - (time.perf_counter() - started)))
        sent[number] = await send(number, due_s, started)

    if level.rate is None:
        await asyncio.gather(*(client() for _ in range(level.concurrency or 1)))
    else:
        arrivals = poisson_arrivals(level.rate, count, settings.seed).tolist()
        await asyncio.gather(*(arrival(number, due_s) for number, due_s in enumerate(arrivals)))
    run = Run(level, method, time.perf_counter() - started, tuple(sent[number] for number in range(count)))
    if not run.answered:
        raise DDTreeError(f"no request was answered at {level} with method {method}: {next(iter(run.errors))}")
    return run


@with_options()
def main(
    settings: LoadSettings,
    url: Annotated[str | None, typer.Option(help="a running server, with or without /v1")] = None,
    engine: Annotated[str | None, typer.Option(help="served for the time of the measurement")] = None,
    concurrency: Annotated[str, typer.Option(help="numbers of clients")] = "",
    rate: Annotated[str, typer.Option(help="requests per second")] = "",
    methods: str = f"{DEFAULT_METHOD},{BASELINE}",
    output: Json = None,
) -> None:
    if (url is None) == (engine is None):
        raise UsageError("give one of --url and --engine")
    methods_asked, rates = tuple(methods.split(",")), numbers(rate)
    settings = replace(settings, concurrency=integers(concurrency), rates=rates, methods=methods_asked)
    waiting = str(2 * max(settings.concurrency, default=64))
    limits = ("--max-requests", waiting, "--max-waiting", waiting, "--request-timeout", "0")
    server = nullcontext(url) if url else started_server(engine or "", *limits)
    with progress_bars() as progress, server as address:
        result = run_load(settings, address, progress)
    if output is not None:
        runs = [{**figures(run), "requests": [asdict(sent) for sent in run.sent]} for run in result.runs]
        body = {"settings": asdict(settings), "url": result.url, "environment": result.environment, "runs": runs}
        output.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(text(result), end="")
