"""Putting a server under load, level by level, each level with every method."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.bench.environment import read_environment
from ddtree_trt.bench.load.arrivals import poisson_arrivals
from ddtree_trt.bench.load.client import Client, Sent
from ddtree_trt.bench.load.result import LoadResult, Run
from ddtree_trt.bench.load.server import limits_for, started_server
from ddtree_trt.bench.load.settings import DEFAULT_METHOD, Level, LoadSettings
from ddtree_trt.bench.prompts import BenchPrompt, load_prompts
from ddtree_trt.errors import DDTreeError

_KEYS = ("DDTREE_API_KEY", "OPENAI_API_KEY")  # environment: what the server asks for
_STAGE = "requests"
_Send = Callable[[int, float, float], Awaitable[Sent]]  # number of the request, its time, the level's start


def run_load(settings: LoadSettings, progress: Progress = no_progress) -> LoadResult:
    """Measure the settings' server, or one that is started for it and ended afterwards.

    Raises UsageError for unknown prompts, DDTreeError where the server cannot be used or answers no request of a run.
    """
    prompts = load_prompts(settings.prompts, settings.limit)
    random.Random(settings.seed).shuffle(prompts)
    if settings.url is not None:
        return asyncio.run(_measure(settings, settings.url, prompts, progress))
    assert settings.engine is not None, "an engine where no server runs"
    with started_server(settings.engine, *limits_for(max(settings.concurrency, default=0))) as url:
        return asyncio.run(_measure(settings, url, prompts, progress))


async def _measure(settings: LoadSettings, url: str, prompts: list[BenchPrompt], progress: Progress) -> LoadResult:
    key = next((value for name in _KEYS if (value := os.environ.get(name))), None)
    total = sum(settings.requests_at(level) for level in settings.levels) * len(settings.methods)
    done = itertools.count(1)
    runs: list[Run] = []
    async with Client(url, key) as client:
        model = await client.model()
        for method in settings.methods:  # not measured: the first request of a kind takes longer
            warm = await client.send(prompts[0], _fields(settings, model, method, 0), 0.0, time.perf_counter())
            if warm.error is not None:
                raise DDTreeError(f"{client.url} refused a request with method {method}: {warm.error}")
        for place, level in enumerate(settings.levels):
            # In turn the first: what a level leaves in the server's caches is not always one method's.
            for method in settings.methods if place % 2 == 0 else reversed(settings.methods):

                async def send(number: int, due_s: float, started: float, method: str = method) -> Sent:
                    fields = _fields(settings, model, method, number)
                    sent = await client.send(prompts[number % len(prompts)], fields, due_s, started)
                    progress(_STAGE, next(done), total)
                    return sent

                runs.append(await _run(settings, level, method, send))
    order = {method: place for place, method in enumerate(settings.methods)}
    runs.sort(key=lambda run: (settings.levels.index(run.level), order[run.method]))
    return LoadResult(settings, client.url, model, read_environment(), tuple(runs))


def _fields(settings: LoadSettings, model: str, method: str, number: int) -> dict[str, Any]:
    """The fields of a request beside its prompt: the same for every method but the method's name."""
    chosen = {} if method == DEFAULT_METHOD else {"method": method}
    seed = settings.seed + number
    return {
        "model": model,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "seed": seed,
        **chosen,
    }


async def _run(settings: LoadSettings, level: Level, method: str, send: _Send) -> Run:
    count, started = settings.requests_at(level), time.perf_counter()
    if level.concurrency is not None:
        sent = await _closed_loop(level.concurrency, count, send, started)
    else:
        assert level.rate is not None
        sent = await _open_loop(poisson_arrivals(level.rate, count, settings.seed).tolist(), send, started)
    run = Run(level, method, time.perf_counter() - started, tuple(sent))
    if not run.answered:
        raise DDTreeError(f"no request was answered at {level} with method {method}: {next(iter(run.errors))}")
    return run


async def _closed_loop(clients: int, count: int, send: _Send, started: float) -> list[Sent]:
    """Answers in the order of the requests; each client sends its next request when the one before has ended."""
    sent: dict[int, Sent] = {}
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            sent[number] = await send(number, time.perf_counter() - started, started)

    await asyncio.gather(*(work() for _ in range(min(clients, count))))
    return [sent[number] for number in range(count)]


async def _open_loop(arrivals_s: list[float], send: _Send, started: float) -> list[Sent]:
    """Answers in the order of the requests, which are sent at their times, whatever has become of the others."""

    async def at(number: int, due_s: float) -> Sent:
        await asyncio.sleep(max(0.0, due_s - (time.perf_counter() - started)))
        return await send(number, due_s, started)

    return await asyncio.gather(*(at(number, due_s) for number, due_s in enumerate(arrivals_s)))
