"""Closed engines, and engines in a process that was forked."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pacing import WAIT_S

from ddtree_trt import LLM, AsyncLLM, SamplingParams
from ddtree_trt.errors import UsageError

SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
PROMPT = "Lars has 9 keys. Lenlot has double that number."


@pytest.fixture(scope="module")
def llm(tiny_engine: Path) -> Iterator[LLM]:
    with LLM(tiny_engine) as llm:
        yield llm


# Closed, and forked


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
    """The error `work` raises in a forked process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # no assertion and no clean-up of the parent's may run here
        try:
            work()
            os.write(writer, b"no error")
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writer)
    for _ in range(round(WAIT_S / 0.1)):
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the forked process hangs")
    with os.fdopen(reader) as said:
        return said.read()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_is_told_to_load_its_own(llm: LLM, tiny_engine: Path) -> None:
    stream = llm.stream(PROMPT, LONG)
    next(stream)
    for work in (lambda: llm.generate(PROMPT), lambda: next(stream)):
        said = in_a_fork(work)
        assert said.startswith(
            f"UsageError: this LLM was loaded by process {os.getpid()} and cannot be used in process"
        )
        assert "load one here" in said
    assert in_a_fork(llm.close) == in_a_fork(stream.close) == "no error"
    stream.close()
    assert llm.generate(PROMPT, SHORT)[0].finished, "the parent's is as it was"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_cannot_wait_for_the_parents_worker(tiny_engine: Path) -> None:
    llm = AsyncLLM(tiny_engine)
    try:
        for call in (lambda: llm.complete(PROMPT), llm.drain, lambda: llm.abort("x")):
            said = in_a_fork(lambda call=call: asyncio.run(call()))  # type: ignore[misc]
            assert said.startswith(f"UsageError: this AsyncLLM was loaded by process {os.getpid()}")
        assert in_a_fork(llm.shutdown) == "no error"
        assert asyncio.run(llm.complete(PROMPT, SHORT)).finished
    finally:
        llm.shutdown()
