"""An `LLM` over two processes: the tokens of one, whatever the method; and what a rank that fails leaves."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_builds import CHATS
from pacing import complete

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.errors import EngineError, UsageError
from ddtree_trt.runtime.async_llm import AsyncLLM
from ddtree_trt.runtime.engines.base import VerifyRequest
from ddtree_trt.runtime.engines.torch.engine import TorchEngine
from ddtree_trt.runtime.engines.torch.parallel import engine as parallel
from ddtree_trt.runtime.engines.torch.parallel.engine import ParallelEngine
from ddtree_trt.runtime.engines.torch.parallel.ranks import Group, RankConfig
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.options import EngineOptions
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.tree import token_chain

TREE = token_chain(np.arange(1, 5))
TWO = EngineOptions(tensor_parallel_size=2, threads=1)


PROMPTS = CHATS[::12]


def generate(llm: LLM) -> Iterator[tuple[str, list[Any]]]:
    """Tokens by case, of more prompts than there are slots."""
    assert len(PROMPTS) > llm.engine.manifest.limits.max_batch
    cases: list[dict[str, Any]] = [
        {"method": "ar"},
        {"method": "dflash"},
        {"method": "ddtree", "tree_budget": 16},
        {"method": "ddtree", "tree_budget": 12, "temperature": 0.8, "top_p": 0.9, "seed": 7, "logprobs": 2, "n": 2},
        {"method": "dflash-sample", "temperature": 0.7, "seed": 3},
    ]
    for case in cases:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=16, ignore_eos=True, **case))
        yield str(case), [completion.token_ids for output in outputs for completion in output.outputs]
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    first = llm.generate(PROMPTS[:1], params)[0]
    rows = [row for row in first.prompt_logprobs or [] if row is not None]
    yield "prompt_logprobs", [(row.token_id, row.rank, row.top[0][0]) for row in rows]


def test_an_llm_gives_the_tokens_of_one_process_and_ends_with_a_rank(directory: Path) -> None:
    with LLM(directory, threads=1) as one:
        expected = list(generate(one))
    with LLM(directory, threads=1, tensor_parallel_size=2) as two:
        for (case, tokens), (_, found) in zip(expected, generate(two), strict=True):
            assert found == tokens, case
        assert not two.generate(PROMPTS[0])[0].metrics.on_device
        # A call that the other rank alone is sent, and refuses.
        engine = two.engine
        assert isinstance(engine, ParallelEngine)
        engine._workers.send(TorchEngine.truncate, (1, 600))
        refused = r"ended: rank 1 of 2 failed: EngineError: slot 1 holds \d+ tokens, cannot keep the first 600"
        for _ in range(2):  # and it stays ended
            with pytest.raises(EngineError, match=refused):
                two.generate(PROMPTS[0])


def test_a_killed_rank_ends_an_engine_that_serves(directory: Path) -> None:
    """The request under way is told why, and so is every later one."""
    said = "rank 1 of 2 was ended by SIGKILL"

    async def work(llm: AsyncLLM) -> None:
        engine = llm.engine
        assert isinstance(engine, ParallelEngine)
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        with pytest.raises(EngineError, match=said):
            async for _ in llm.submit(PROMPTS[0], params):
                engine._workers.processes[0].kill()
        assert llm.failure is not None
        with pytest.raises(EngineError, match=said):
            await complete(llm, PROMPTS[0], params)

    llm = AsyncLLM(directory, threads=1, tensor_parallel_size=2)
    try:
        asyncio.run(work(llm))
    finally:
        llm.shutdown()


def test_a_rank_that_hangs_ends_in_an_error(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it opens, from which nothing is left behind, and in the middle of a pass."""
    manifest, opens = load_manifest(directory), "an engine of 2 ranks could not be opened: "
    with monkeypatch.context() as patch:
        patch.setattr(parallel, "OPENING_S", 0.1)  # a process takes longer to start
        with pytest.raises(EngineError, match=f"{opens}rank 1 of 2 did not report 'here' in time"):
            ParallelEngine.open(directory, manifest, TWO)
    assert not multiprocessing.active_children()
    alone = RankConfig(0, 2, str(tmp_path / "store"), torch.device("cpu"), 1, directory, manifest, timeout_s=0.1)
    with pytest.raises(RuntimeError, match="Wait timeout"):
        Group(alone)

    engine = ParallelEngine.open(directory, manifest, TWO, timeout_s=2.0)
    (process,) = engine._workers.processes
    engine.prefill(0, np.arange(20), rows="last", taps=True)
    with pytest.raises(UsageError, match="is in a process group of torch"):
        LLM(directory, tensor_parallel_size=2)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"ended: rank 0 of 2 failed: .* [Tt]im"):
            engine.verify([VerifyRequest(0, TREE)])
    assert not process.is_alive()
    engine.close()


def test_the_other_ranks_end_with_rank_0(directory: Path) -> None:
    """Also while they wait for its next call."""
    code = (
        "import os, sys, signal\n"
        "if __name__ == '__main__':\n"
        "    from ddtree_trt.runtime.llm import LLM\n"
        "    llm = LLM(sys.argv[1], threads=1, tensor_parallel_size=2)\n"
        "    print(llm.engine._workers.processes[0].pid, flush=True)\n"
        "    sys.stdin.read()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # The pipe that the follower inherits as its stdout ends when it does.
    with subprocess.Popen(
        [sys.executable, "-c", code, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank_0:
        assert rank_0.stdout is not None and rank_0.stdin is not None
        assert int(rank_0.stdout.readline()) > 0
        rank_0.stdin.close()
        assert rank_0.stdout.read() == ""  # returns when no process has the pipe any more
        assert rank_0.wait() == -signal.SIGKILL
