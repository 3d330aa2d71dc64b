"""Measure a server under load: throughput and latencies against concurrent requests or their rate, beside ar.

    python -m workbench load --url http://127.0.0.1:8000 --concurrency 1,4,16,64 [--json FILE] [--plot FILE.png]
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
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.bench.measure import describe_environment
from ddtree_trt.bench.prompts import BenchPrompt, load_prompts
from ddtree_trt.bench.settings import TINY
from ddtree_trt.commands.arguments import with_options
from ddtree_trt.errors import DDTreeError, UsageError
from ddtree_trt.records import option
from ddtree_trt.terminal.printing import progress_bars
from workbench.load.client import Client, Sent
from workbench.load.report import Level, LoadResult, Run, draw, figures, text
from workbench.options import Json, Plot, integers, numbers
from workbench.server import started_server

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
    async with Client(url, key) as client:
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
    plot: Plot = None,
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
    if plot is not None:
        draw(result, plot)
    print(text(result), end="")
