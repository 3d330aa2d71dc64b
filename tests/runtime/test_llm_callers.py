"""Who may use an LLM and when: threads, forks, closed engines, interrupts; and callers whose own code fails."""

import asyncio
import gc
import itertools
import logging
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from onnxruntime import OrtValue
from pacing import WAIT_S, complete

from ddtree_trt import LLM, AsyncLLM, SamplingParams
from ddtree_trt.errors import UsageError

SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
PROMPT = "Lars has 9 keys. Lenlot has double that number."


def on_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns, or the error it raises, on another thread."""
    with ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(work).result(WAIT_S)
        except Exception as error:
            return error


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


def test_what_callers_do_to_a_prompt_they_were_shown_changes_no_cache(llm: LLM) -> None:
    for part in llm.stream(PROMPT, SHORT):
        part.prompt_token_ids[0] = 7
    assert llm.generate(part.prompt_token_ids, SHORT)[0].usage.cached_tokens == 0


@pytest.mark.parametrize("tokens", [2, 40])
def test_what_a_watcher_raises_is_raised_in_the_last_round_too(llm: LLM, tokens: int) -> None:
    with pytest.raises(TypeError):
        list(llm.stream(PROMPT, SamplingParams(max_tokens=tokens), on_round=len))  # type: ignore[arg-type]


def test_a_second_thread_is_refused_while_a_call_works(llm: LLM) -> None:
    """And may call between the parts of a stream, which go on as they would."""
    refusals: list[Any] = []

    def while_it_works(round: object) -> None:
        if not refusals:
            refusals.extend(on_thread(work) for work in (lambda: llm.generate(PROMPT, SHORT), llm.close))
            with pytest.raises(UsageError, match="a call that has not returned"):
                llm.generate(PROMPT, SHORT)  # from within the call

    expected = llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
    tokens: list[int] = []
    for part in llm.stream(PROMPT, SHORT, on_round=while_it_works):
        tokens += part.outputs[0].token_ids
        assert on_thread(lambda: llm.generate(PROMPT, SHORT))[0].outputs[0].token_ids == expected
    assert tokens == expected
    assert len(refusals) == 2
    for error in refusals:
        assert isinstance(error, UsageError)
        assert "in use by a call that has not returned; use AsyncLLM" in str(error)


def test_many_threads_at_once_lose_no_slot(llm: LLM) -> None:
    expected = llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids

    def ask(_: int) -> Any:
        try:
            return llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
        except UsageError as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        answers = [o for o in pool.map(ask, range(80), timeout=WAIT_S) if not isinstance(o, UsageError)]
    assert answers == [expected] * len(answers) and answers
    assert llm.core.scheduler.free_slots == llm.core.scheduler.slots and not llm.core.scheduler.busy


def test_a_stream_dropped_within_a_call_frees_its_slot_after_it(llm: LLM) -> None:
    """Garbage is collected wherever memory runs short: also in the middle of a round, which must not be disturbed."""
    held = [llm.stream(PROMPT, LONG)]
    next(held[0])
    occupied = []

    def drop(round: object) -> None:
        if held:
            held.clear()
            gc.collect()
        occupied.append(llm.core.scheduler.slots - llm.core.scheduler.free_slots)

    expected = llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
    parts = list(llm.stream(PROMPT, SHORT, on_round=drop))
    assert [t for p in parts for t in p.outputs[0].token_ids] == expected
    assert occupied[0] == 2 and occupied[-1] == 1
    assert llm.core.scheduler.free_slots == llm.core.scheduler.slots


def test_a_closed_llm_says_so(tiny_engine: Path) -> None:
    llm = LLM(tiny_engine)
    stream = llm.stream(PROMPT, LONG)
    next(stream)
    llm.close()
    llm.close()
    for work in (lambda: llm.generate(PROMPT), lambda: llm.stream(PROMPT), lambda: next(stream)):
        with pytest.raises(UsageError, match="this LLM is closed; make another one"):
            work()
    stream.close()


def in_a_fork(work: Callable[[], object]) -> str:
    context = multiprocessing.get_context("fork")
    said, tell = context.Pipe(duplex=False)

    def run() -> None:
        try:
            work()
            tell.send("no error")
        except BaseException as error:
            tell.send(f"{type(error).__name__}: {error}")
        os._exit(0)  # no clean-up of the parent's may run here

    process = context.Process(target=run)
    process.start()
    found = said.recv() if said.poll(WAIT_S) else "the forked process hangs"
    process.kill()
    process.join()
    return found


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_is_told_to_load_its_own(llm: LLM, tiny_engine: Path) -> None:
    stream = llm.stream(PROMPT, LONG)
    next(stream)
    for work in (lambda: llm.generate(PROMPT), lambda: next(stream)):
        said = in_a_fork(work)
        assert said.startswith(f"UsageError: this LLM was loaded by process {os.getpid()} and cannot be used in")
        assert "load one here" in said
    assert in_a_fork(llm.close) == in_a_fork(stream.close) == "no error"
    stream.close()
    assert llm.generate(PROMPT, SHORT)[0].finished, "the parent's is as it was"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_cannot_wait_for_the_parents_worker(tiny_engine: Path) -> None:
    llm = AsyncLLM(tiny_engine)
    try:
        for call in (
            lambda: asyncio.run(complete(llm, PROMPT)),
            lambda: asyncio.run(llm.drain()),
            lambda: asyncio.run(llm.abort("x")),
        ):
            assert in_a_fork(call).startswith(f"UsageError: this AsyncLLM was loaded by process {os.getpid()}")
        assert in_a_fork(llm.shutdown) == "no error"
        assert asyncio.run(complete(llm, PROMPT, SHORT)).finished
    finally:
        llm.shutdown()


@pytest.mark.parametrize("at", [0, 3])
def test_an_interrupt_in_the_first_pass_leaves_the_engine_usable(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    real, calls = OrtValue.ortvalue_from_numpy, itertools.count()

    def bind(array: Any) -> OrtValue:
        if next(calls) == at:
            raise KeyboardInterrupt
        return real(array)

    with LLM(tiny_engine) as llm:
        prompts = [PROMPT] * llm.core.scheduler.slots
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(OrtValue, "ortvalue_from_numpy", bind)
            llm.generate(prompts, SHORT)
        assert len({tuple(o.outputs[0].token_ids) for o in llm.generate(prompts, SHORT)}) == 1


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


@pytest.mark.parametrize("error", [ValueError("scripted"), SystemExit(1)])
async def test_what_on_finished_raises_changes_nothing(
    tiny_engine: Path, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    told = []

    def on_finished(request: Any) -> None:
        told.append(request.request_id)
        raise error

    llm = AsyncLLM(tiny_engine, on_finished=on_finished)
    try:
        with caplog.at_level(logging.ERROR):
            outputs = [await complete(llm, PROMPT, SHORT, name) for name in "abc"]
        assert [len(o.outputs[0].token_ids) for o in outputs] == [12] * 3 and told == [*"abc"]
        assert llm.failure is None and llm.running == 0
        assert sum("on_finished failed for request" in r.message for r in caplog.records) == 3
    finally:
        llm.shutdown()
