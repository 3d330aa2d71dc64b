"""Who may use an LLM and when: threads, forks, closed engines, interrupts; and callers whose own code fails."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pacing import WAIT_S

from ddtree_trt import LLM, AsyncLLM, SamplingParams
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.callers import Callers

SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
PROMPT = "Lars has 9 keys. Lenlot has double that number."


@pytest.fixture(scope="module")
def llm(tiny_engine: Path) -> Iterator[LLM]:
    with LLM(tiny_engine) as llm:
        yield llm


def on_thread(name: str, work: Callable[[], Any]) -> Any:
    """What `work` returns, or the error it raises, on a thread of that name."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(WAIT_S)
    assert result, "the thread hangs"
    return result[0]


# Parts are snapshots


def test_what_was_handed_out_does_not_change(llm: LLM) -> None:
    parts, seen = [], []
    for part in llm.stream(PROMPT, LONG):
        parts.append(part)
        seen.append(part.metrics.to_dict() | {"lengths": list(part.metrics.acceptance_lengths)})
    assert len(parts) > 10
    assert [p.metrics.to_dict() | {"lengths": p.metrics.acceptance_lengths} for p in parts] == seen
    for earlier, later in itertools.pairwise(parts):
        assert earlier.metrics.rounds < later.metrics.rounds
        assert earlier.metrics.output_tokens == earlier.usage.completion_tokens <= later.usage.completion_tokens


# Threads


def test_a_second_thread_is_refused_by_the_name_of_the_first(llm: LLM) -> None:
    """While a call works, and between the parts of a stream; the first caller notices nothing."""
    refusals: list[Any] = []

    def while_it_works(round: object) -> None:
        if not refusals:
            refusals.extend(on_thread("other", work) for work in (lambda: llm.generate(PROMPT, SHORT), llm.close))

    expected = llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
    tokens: list[int] = []
    for part in llm.stream(PROMPT, SHORT, on_round=while_it_works):
        tokens += part.outputs[0].token_ids
        for work in (lambda: llm.generate(PROMPT, SHORT), lambda: next(llm.stream(PROMPT, SHORT))):
            error = on_thread("other", work)
            assert isinstance(error, UsageError)
            assert "in use by thread 'MainThread', which has streams open; use AsyncLLM" in str(error)
    assert tokens == expected
    assert len(refusals) == 2
    for error in refusals:
        assert isinstance(error, UsageError)
        assert "in use by thread 'MainThread', whose call has not returned; use AsyncLLM" in str(error)
    assert on_thread("other", lambda: llm.generate(PROMPT, SHORT))[0].outputs[0].token_ids == expected


def test_a_call_from_within_a_call_is_refused(llm: LLM) -> None:
    refused = []

    def again(round: object) -> None:
        with pytest.raises(UsageError, match="whose call has not returned"):
            llm.generate(PROMPT, SHORT)
        refused.append(True)

    assert list(llm.stream(PROMPT, SHORT, on_round=again))[-1].finished and refused


def test_a_stream_may_be_read_on_by_another_thread(llm: LLM) -> None:
    """As web frameworks read iterators: every part on whichever thread of a pool is free."""
    whole = llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
    stream = llm.stream(PROMPT, SHORT)
    tokens: list[int] = []
    for number in itertools.count():
        part = on_thread(f"pool-{number}", lambda: next(stream, None))
        if part is None:
            break
        tokens += part.outputs[0].token_ids
    assert tokens == whole


def test_a_thread_that_ended_holds_nothing(llm: LLM) -> None:
    left = llm.stream(PROMPT, LONG)
    on_thread("gone", lambda: next(left))
    assert llm.generate(PROMPT, SHORT)[0].finished
    left.close()
    assert llm.core.scheduler.free_slots == llm.core.scheduler.slots


def test_many_threads_at_once_lose_no_slot(llm: LLM) -> None:
    expected = llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
    outcomes: list[Any] = []

    def hammer() -> None:
        for _ in range(20):
            try:
                outcomes.append(llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids)
            except UsageError as error:
                outcomes.append(error)

    threads = [threading.Thread(target=hammer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    answers = [o for o in outcomes if not isinstance(o, UsageError)]
    assert len(outcomes) == 80 and answers == [expected] * len(answers) and answers
    assert llm.core.scheduler.free_slots == llm.core.scheduler.slots and not llm.core.scheduler.busy


class LateLock:
    """A lock whose holder is told, while it still holds it, that it is about to give it back."""

    def __init__(self, late: Callable[[], None]) -> None:
        self._lock, self._late = threading.Lock(), late

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._late()
        self._lock.release()


@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_that_ends_as_a_call_returns_is_not_left_behind(fails: bool) -> None:
    """Between the call's last look for endings and the moment it gives the lock back."""
    callers = Callers()
    told: list[str] = []
    ended: list[str] = []

    def late() -> None:
        if not told:
            told.append("stream")
            on_thread("other", lambda: callers.end("stream", lambda: ended.append("stream")))
            assert not ended, "the call is not over"

    callers._lock = LateLock(late)  # type: ignore[assignment]

    def work() -> None:
        if fails:
            raise ValueError("own")

    with contextlib.suppress(ValueError):
        callers.call(work)
    assert ended == ["stream"] and not callers._lock.locked()


def test_a_stream_dropped_within_a_call_frees_its_slot_after_it(llm: LLM) -> None:
    """Garbage is collected wherever memory runs short: also in the middle of a round, which must not be disturbed."""
    held = [llm.stream(PROMPT, LONG)]
    next(held[0])
    occupied = []

    def drop(round: object) -> None:
        held.clear()
        gc.collect()
        occupied.append(llm.core.scheduler.slots - llm.core.scheduler.free_slots)

    expected = llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
    parts = list(llm.stream(PROMPT, SHORT, on_round=drop))
    assert [t for p in parts for t in p.outputs[0].token_ids] == expected
    assert occupied[0] == 2 and occupied[-1] == 1
    assert llm.core.scheduler.free_slots == llm.core.scheduler.slots


# Interrupts and cancellations


def interrupting(llm: LLM, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """KeyboardInterrupt from the engine's call number `after`."""
    calls = itertools.count()
    for verb in ("prefill", "draft", "verify", "commit"):
        real = getattr(llm.engine, verb)

        def call(*args: Any, real: Any = real, **options: Any) -> Any:
            if next(calls) == after:
                raise KeyboardInterrupt
            return real(*args, **options)

        monkeypatch.setattr(llm.engine, verb, call)


def test_an_interrupt_anywhere_leaves_a_usable_llm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
    for after in range(9):
        with monkeypatch.context() as patch:
            interrupting(llm, patch, after)
            with pytest.raises(KeyboardInterrupt):
                if after % 2:
                    llm.generate([PROMPT, PROMPT + " x"], LONG)
                else:
                    list(llm.stream(PROMPT, LONG))
        assert llm.core.scheduler.free_slots == llm.core.scheduler.slots and not llm.core.scheduler.busy
        assert llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids == expected


@pytest.mark.parametrize("count", [30, pytest.param(400, marks=pytest.mark.slow)])
def test_interrupts_at_any_moment(llm: LLM, count: int) -> None:
    """As Ctrl-C in a program that goes on: the signal may come between any two steps of Python."""
    rng = random.Random(count)
    expected = llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
    interrupted = 0

    def interrupt(signal_number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(count):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, 0.03))
                if number % 2:
                    llm.generate([PROMPT, PROMPT + " x"], LONG)
                else:
                    for _ in llm.stream(PROMPT, LONG):
                        pass
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            assert llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids == expected
            assert llm.core.scheduler.free_slots == llm.core.scheduler.slots and not llm.core.scheduler.busy
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > count / 2


def test_five_hundred_cancellations_leave_every_slot_free(llm: LLM) -> None:
    rng = random.Random(5)
    expected = llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
    open_streams: list[Any] = []
    for _ in range(500):
        open_streams.append(llm.stream(f"{PROMPT} {rng.randrange(50)}", LONG))
        if rng.random() < 0.5:
            next(open_streams[-1])
        while len(open_streams) > rng.randrange(12):
            leaving = open_streams.pop(rng.randrange(len(open_streams)))
            if rng.random() < 0.5:
                leaving.close()
    open_streams.clear()
    assert llm.core.scheduler.free_slots == llm.core.scheduler.slots and not llm.core.scheduler.busy
    assert llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids == expected


# Callbacks


@pytest.mark.parametrize("error", [ValueError("scripted"), SystemExit(1)])
def test_what_on_finished_raises_changes_nothing(
    tiny_engine: Path, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    told = []

    def on_finished(request: Any) -> None:
        told.append(request.request_id)
        raise error

    llm = AsyncLLM(tiny_engine, on_finished=on_finished)

    async def ask() -> list[Any]:
        return list(await asyncio.gather(*(llm.complete(PROMPT, SHORT, f"r{i}") for i in range(3))))

    try:
        with caplog.at_level(logging.ERROR):
            outputs = [output for _ in range(2) for output in asyncio.run(asyncio.wait_for(ask(), WAIT_S))]
        assert all(o.finished and len(o.outputs[0].token_ids) == 12 for o in outputs)
        assert sorted(told) == ["r0", "r0", "r1", "r1", "r2", "r2"]
        assert llm.failure is None and llm.running == 0
        assert sum("on_finished failed for request" in r.message for r in caplog.records) == 6
    finally:
        llm.shutdown()
