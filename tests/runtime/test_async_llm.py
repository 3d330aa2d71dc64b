"""AsyncLLM: many callers, one engine, and no one's fate decides another's."""

import asyncio
import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_builds import CHATS
from pacing import WAIT_S, Passes, complete, until

from ddtree_trt import LLM, RequestOutput, SamplingParams
from ddtree_trt.errors import EngineError, UsageError
from ddtree_trt.runtime.async_llm import AsyncLLM, QueueFull, iterate_parts
from ddtree_trt.runtime.request_maker import Request

PROMPTS = CHATS[:12]
LONG = SamplingParams(max_tokens=1900, ignore_eos=True, method="ar")


@pytest.fixture
def llm(tiny_engine: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(tiny_engine)
    yield llm
    llm.shutdown()


def essence(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(o.index, o.text, o.token_ids, o.finish_reason, o.stop_reason) for o in output.outputs]


def mixed_params() -> list[SamplingParams]:
    every = [
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=24, method="ar", logprobs=2),
        SamplingParams(max_tokens=32, tree_budget=4, stop=("is", "5")),
        SamplingParams(max_tokens=16, n=2, temperature=0.8, seed=7, echo=True),
    ]
    return [every[i % len(every)] for i in range(len(PROMPTS))]


async def test_concurrent_callers_get_what_llm_generate_gives(tiny_engine: Path, llm: AsyncLLM) -> None:
    params = mixed_params()
    with LLM(tiny_engine) as alone:
        expected = [essence(alone.generate([p], s)[0]) for p, s in zip(PROMPTS, params, strict=True)]
    outputs = await asyncio.gather(*(complete(llm, *asked) for asked in zip(PROMPTS, params, strict=True)))
    assert [essence(output) for output in outputs] == expected
    await llm.drain()
    assert (llm.running, llm.waiting) == (0, 0)


async def test_parts_joined_are_the_output_and_generate_grows_towards_it(llm: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=48, n=2, logprobs=1, echo=True, stop=("zzz",))
    parts: list[RequestOutput] = []
    passes = Passes(llm.engine)
    passes.in_step_with(lambda: len(parts), 2, slots=2)
    async for part in llm.submit(PROMPTS[0], params):
        parts.append(part)
    passes.release()
    grown = [whole async for whole in llm.generate(PROMPTS[0], params)]
    joined = parts[0]
    for part in parts[1:]:
        joined = joined.joined(part)
    assert essence(joined) == essence(grown[-1])
    assert len(parts) > 2 and not any(p.finished for p in parts[:-1]) and parts[-1].finished
    for earlier, later in itertools.pairwise(grown):
        for o in earlier.outputs:
            assert later.outputs[o.index].text.startswith(o.text)
    assert all(len(o.logprobs or []) == len(o.token_ids) for o in joined.outputs)
    assert joined.usage.completion_tokens == sum(len(o.token_ids) for o in joined.outputs)


async def test_what_a_slow_reader_left_unread_comes_as_one_part(llm: AsyncLLM) -> None:
    with llm.submit(PROMPTS[0], SamplingParams(max_tokens=40)) as submission:
        await llm.drain()
        parts = [part async for part in submission]
    assert len(parts) == 1
    assert essence(parts[0]) == essence(await complete(llm, PROMPTS[0], SamplingParams(max_tokens=40)))


@pytest.mark.parametrize("streams", [True, False])
async def test_a_step_calls_the_loop_once(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    """However many requests are read; who waits for a whole output is called at its end alone."""
    loop, step, counts = asyncio.get_running_loop(), llm.core.scheduler.step, {"steps": 0, "calls": 0}
    call = loop.call_soon_threadsafe

    def counted(name: str, work: Any, *given: Any) -> Any:
        counts[name] += 1
        return work(*given)

    monkeypatch.setattr(llm.core.scheduler, "step", lambda: counted("steps", step))
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *given: counted("calls", call, *given))
    submissions = [llm.submit(p, SamplingParams(max_tokens=40, ignore_eos=True, method="ar")) for p in PROMPTS]
    if streams:
        assert {place async for place, _ in iterate_parts(submissions)} == set(range(len(PROMPTS)))
    else:
        await asyncio.gather(*(submission.result() for submission in submissions))
    assert 0 < counts["calls"] <= (counts["steps"] if streams else len(PROMPTS))
    assert counts["steps"] > 40


@pytest.mark.parametrize("way", ["close", "task", "garbage", "abort", "submission"])
async def test_every_way_of_leaving_frees_the_slot(llm: AsyncLLM, way: str) -> None:
    """Whoever leaves during a pass has left before the next one."""
    passes = Passes(llm.engine)
    parts: Any = aiter(llm.submit(PROMPTS[0], LONG, "mine"))
    await parts.__anext__()
    assert llm.running == 1
    leaving: list[asyncio.Task[None]] = []
    if way == "submission":
        other = llm.submit(PROMPTS[1], LONG)
        await until(lambda: llm.running == 2)
    passes.hold()
    await until(lambda: passes.held)
    begun = passes.begun

    async def read_on() -> None:
        async for _ in parts:
            pass

    if way == "close":
        await parts.aclose()
    elif way == "garbage":
        del parts
        gc.collect()
    elif way == "task":
        leaving.append(asyncio.ensure_future(read_on()))
        await asyncio.sleep(0)  # it has begun to read
        leaving[0].cancel()
    elif way == "abort":
        await llm.abort("mine")
    else:
        with other:
            pass
        await parts.aclose()
        with pytest.raises(StopAsyncIteration):
            await other.__aiter__().__anext__()
    await until(lambda: len(llm._commands) == (2 if way == "submission" else 1))
    passes.release()
    await until(lambda: llm.running == 0 and llm.waiting == 0)
    # The slots take turns: where two leave, the second one's pass may belong to the round under way.
    assert passes.begun <= begun + (way == "submission"), "no round after the one under way"
    await asyncio.gather(*leaving, return_exceptions=True)
    if way == "abort":
        last = [part async for part in parts][-1]
        assert last.finished and last.outputs[0].finish_reason == "abort"


async def test_the_queue_is_bounded(tiny_engine: Path) -> None:
    llm = AsyncLLM(tiny_engine, max_waiting=2)
    try:
        room = llm.slots + 2
        held = [llm.submit(PROMPTS[0], LONG) for _ in range(room - 1)]
        with pytest.raises(QueueFull, match="at most 10 may"):
            llm.submit(PROMPTS[0], SamplingParams(n=2, temperature=1))
        held.append(llm.submit(PROMPTS[0], LONG))
        with pytest.raises(QueueFull):
            await complete(llm, PROMPTS[0], LONG)
        with pytest.raises(UsageError, match=f"n {room + 1} is more than the {room}"):
            llm.submit(PROMPTS[0], SamplingParams(n=room + 1, temperature=1))
        held.pop().cancel()
        await until(lambda: llm.waiting == 1)
        with llm.submit(PROMPTS[0], LONG):
            pass
        for submission in held:
            submission.cancel()
        await llm.drain()
    finally:
        llm.shutdown()


async def test_a_wrong_call_is_refused_before_it_reaches_the_engine(llm: AsyncLLM) -> None:
    with pytest.raises(UsageError, match="max_seq_len"):
        llm.submit([5] * 100_000)
    held = llm.submit(PROMPTS[0], LONG, "twice")
    with pytest.raises(UsageError, match="'twice' is already in use"):
        llm.submit(PROMPTS[0], LONG, "twice")
    parts = aiter(held)
    await anext(parts)  # the second call has not cancelled the first
    held.cancel()
    await llm.drain()
    await complete(llm, PROMPTS[0], SamplingParams(max_tokens=2), "twice")


async def test_nobody_waits_for_a_worker_that_died(llm: AsyncLLM) -> None:
    submission = llm.submit(PROMPTS[0], LONG)

    def broken() -> None:
        raise RuntimeError("scripted bug")

    llm.core.scheduler.step = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineError, match="RuntimeError: scripted bug"):
        await submission.result()
    with pytest.raises(EngineError, match="restart"):
        llm.submit(PROMPTS[0])
    assert isinstance(llm.failure, EngineError)
    await asyncio.wait_for(llm.drain(), WAIT_S)


async def test_a_reset_forgets_prefixes_while_others_run(llm: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=8)
    with llm.submit(PROMPTS[1], LONG):
        found = []
        for _ in range(2):
            found.append([(await complete(llm, PROMPTS[0], params)).usage.cached_tokens > 0 for _ in range(2)])
            await llm.reset_prefix_cache()
    assert found == [[False, True], [False, True]]
    llm.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        await llm.reset_prefix_cache()


async def test_shutdown_ends_everyone_and_refuses_newcomers(tiny_engine: Path) -> None:
    ended: list[Request] = []
    llm = AsyncLLM(tiny_engine, on_finished=ended.append)
    everyone = [llm.submit(p, LONG) for p in PROMPTS]
    await until(lambda: llm.running == llm.slots)
    llm.shutdown()
    llm.shutdown()
    reasons = [(await s.result()).outputs[0].finish_reason for s in everyone]
    assert reasons == ["abort"] * len(PROMPTS) and len(ended) == len(PROMPTS)
    with pytest.raises(EngineError, match="shut down"):
        llm.submit(PROMPTS[0])


def test_a_closed_event_loop_loses_its_requests_only(tiny_engine: Path) -> None:
    llm = AsyncLLM(tiny_engine)
    try:

        async def leave_one() -> None:
            llm.submit(PROMPTS[0], LONG)
            await until(lambda: llm.running == 1)

        asyncio.run(leave_one())
        assert asyncio.run(complete(llm, PROMPTS[1], SamplingParams(max_tokens=8))).usage.completion_tokens == 8
        asyncio.run(asyncio.wait_for(llm.drain(), WAIT_S))
    finally:
        llm.shutdown()
