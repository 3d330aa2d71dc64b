"""What the TensorRT engine asks of CUDA and TensorRT: per round, when something fails, and by the shipping interfaces.

On the pretended machines of `fake_cuda` and `fake_trt_engine`.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fake_cuda import cudaError_t
from fake_trt_engine import BLOCK, LIMITS, PROMPTS, Machine, generate
from fake_trt_runtime import FakeContext
from numerics import random_tree
from real_builder import rtx

from ddtree_trt.device.buffers import buckets
from ddtree_trt.device.libraries import make_log
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.engines.base import DraftRequest, VerifyRequest
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.tensorrt.engine import TrtEngine
from ddtree_trt.runtime.llm import LLM

# What a round asks of the device


def rounds(log: list[tuple[Any, ...]]) -> list[list[str]]:
    """The names of what was put on the stream, split behind each wait."""
    parts: list[list[str]] = [[]]
    for name, *_ in log:
        parts[-1].append(name)
        if name == "wait":
            parts.append([])
    return parts


def test_a_round_is_two_uploads_two_graphs_two_downloads(running: Any) -> None:
    llm, machine = running
    log = machine.cuda.log
    options = {"method": "ddtree", "tree_budget": 16}
    generate(llm, PROMPTS[:1], **options)  # captures what it needs
    start = len(log)
    (output,) = generate(
        llm, ["There are 6 drawers, each with 32 cards. How many cards are there? There are 6"], **options
    )
    steps = rounds(log[start:])
    assert steps[0] == ["upload", "pass", "download", "wait"]  # of the prompt
    first_draft = next(i for i, step in enumerate(steps) if "launch" in step)
    assert len(steps) - 1 - first_draft == 2 * output.metrics.rounds
    drafts, verifications = steps[first_draft:-1:2], steps[first_draft + 1 :: 2]
    whole = ["upload", "launch", "download", "wait"]
    assert verifications == [whole] * output.metrics.rounds
    # A draft comes behind the commit of the round before: rows move only where the path left a gap.
    assert all([name for name in draft if name != "copy"][-4:] == whole for draft in drafts)
    assert sum(draft.count("launch") == 2 for draft in drafts) > 0
    assert not [name for name, *_ in log[start:] if name in ("malloc", "capture")]


def test_a_call_for_several_slots_waits_once(engine: TrtEngine) -> None:
    slots, rng = range(LIMITS.max_batch), np.random.default_rng(0)
    for slot in slots:
        engine.prefill(slot, np.arange(5, 25 + slot), rows="none", taps=True)
    drafts = [DraftRequest(slot, 7, 5, BLOCK - 1) for slot in slots]
    trees = [VerifyRequest(slot, random_tree(rng, 3 + slot, 2048)) for slot in slots]
    for call in (lambda: engine.draft(drafts), lambda: engine.verify(trees)):
        call()  # captured
        before = engine.device.waits
        call()
        assert engine.device.waits == before + 1


def test_a_single_request_captures_nothing(machine: Machine) -> None:
    """Whatever its trees: that was done when the engine was opened, which left every slot empty."""
    machine.store_profile()
    with LLM(machine.directory) as llm:
        engine = llm.engine
        assert isinstance(engine, TrtEngine)
        captured = [entry for entry in machine.cuda.log if entry == ("capture",)]
        assert len(captured) == sum(len(network._captured) for network in engine.networks) == len(machine.cuda.graphs)
        memory = [entry for entry in machine.cuda.log if entry[0] == "malloc"]
        assert memory == [("malloc", engine._loaded.layout.total_bytes)]
        own = LIMITS.max_batch if machine.form.native else 1  # slots with graphs of their own
        assert len(engine.target.network._captured) == own * len(buckets(1 + LIMITS.max_tree_budget))
        assert not any(engine.length(slot) or engine.draftable(slot, 99) for slot in range(LIMITS.max_batch))
        start = len(machine.cuda.log)
        for options in ({"method": "ar"}, {"method": "ddtree", "tree_budget": 16}, {"method": "dflash"}):
            generate(llm, PROMPTS[1:2], **options)
        assert ("capture",) not in machine.cuda.log[start:]


def test_graph_unused_longest_makes_room(machine: Machine, engine: TrtEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree_trt.runtime.engines.tensorrt.network.MOST_CAPTURED", 2)
    first, second, third = (VerifyRequest(0, random_tree(np.random.default_rng(0), size, 2048)) for size in (1, 2, 4))

    def captures(request: VerifyRequest) -> bool:
        start = len(machine.cuda.log)
        engine.verify([request])
        return ("capture",) in machine.cuda.log[start:]

    assert captures(first) and captures(second) and not captures(first)
    assert captures(third), "in place of the second"
    assert not captures(first) and captures(second) and not captures(first)
    assert len(engine.target.network._captured) == len(machine.cuda.graphs) == 2


def test_another_thread_may_take_over(engine: TrtEngine) -> None:
    """As `AsyncLLM` does; every thread begins with GPU 0 as its current one."""
    with ThreadPoolExecutor(1) as other:
        said = other.submit(engine.prefill, 0, np.array([5, 6, 7]), rows="last", taps=True).result()
        assert np.asarray(other.submit(np.asarray, said.logits).result()).shape == (1, 2048)
        other.submit(engine.close).result()


def test_logits_and_states_of_an_earlier_pass_are_gone(engine: TrtEngine) -> None:
    said = engine.prefill(0, np.array([5, 6, 7]), rows="last", taps=True)
    engine.prefill(1, np.array([5, 6, 7]), rows="none", taps=True)
    with pytest.raises(EngineError, match="these logits are gone"):
        said.logits[0]
    tree = random_tree(np.random.default_rng(0), 5, 2048)
    engine.verify([VerifyRequest(0, tree)])
    engine.verify([VerifyRequest(1, tree)])
    with pytest.raises(EngineError, match="slot 0 was not in the last target pass"):
        engine.commit(0, np.array([0]), taps=True)
    with pytest.raises(EngineError, match="a tree of 42 tokens, the engine was built for 41"):
        engine.verify([VerifyRequest(0, random_tree(np.random.default_rng(0), 42, 2048))])
    engine.close()  # the fixture does it again


@pytest.mark.parametrize(
    ("function", "status", "captures"),
    [
        ("cudaStreamSynchronize", cudaError_t.cudaErrorIllegalAddress, False),
        ("cudaGraphInstantiate", cudaError_t.cudaErrorMemoryAllocation, True),
        ("cudaStreamEndCapture", cudaError_t.cudaErrorStreamCaptureInvalidated, True),
    ],
)
def test_errors_carry_cudas_names(
    machine: Machine, engine: TrtEngine, function: str, status: cudaError_t, captures: bool
) -> None:
    engine.prefill(0, np.array([5, 6, 7]), rows="none", taps=True)
    tree = random_tree(np.random.default_rng(0), 5, 2048)
    if not captures:
        engine.verify([VerifyRequest(0, tree)])
    machine.cuda.fail[function] = status
    with pytest.raises(EngineError, match=f"{function} failed with {status.name}: words for {int(status)}"):
        engine.verify([VerifyRequest(0, tree)])
    assert not machine.cuda.fail
    if function == "cudaStreamEndCapture":
        machine.cuda.capturing = None  # what the failed call would have done
    engine.truncate(0, 0)
    engine.prefill(0, np.array([5, 6, 7]), rows="none", taps=True)


def test_tensorrts_refusal_ends_recording(machine: Machine, engine: TrtEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.prefill(0, np.array([5, 6, 7]), rows="none", taps=True)
    execute = FakeContext.execute_async_v3

    def refuse(self: FakeContext, stream: int) -> bool:
        if machine.cuda.capturing is None:
            return execute(self, stream)
        self._engine.log.log(self._engine.log.Severity.ERROR, "no kernel\nfor this")
        return False

    monkeypatch.setattr(FakeContext, "execute_async_v3", refuse)
    with pytest.raises(EngineError, match="the target cannot run: TensorRT refuses the pass; no kernel for this"):
        engine.verify([VerifyRequest(0, random_tree(np.random.default_rng(0), 5, 2048))])
    assert machine.cuda.capturing is None


def test_closing_gives_back_all_it_can(machine: Machine) -> None:
    engine = open_engine(machine.directory)
    machine.cuda.fail["cudaFreeHost"] = cudaError_t.cudaErrorIllegalAddress
    with pytest.raises(EngineError, match="cudaFreeHost failed with cudaErrorIllegalAddress"):
        engine.close()
    assert machine.cuda.leaks == ["pinned"]


# What ships. Calls of TensorRT are checked where `FakeTrt` lists them


def test_tensorrts_log_is_one_that_tensorrt_takes() -> None:
    real = rtx()
    log = make_log(real)
    assert isinstance(log, real.ILogger)
    for severity in real.ILogger.Severity.__members__.values():
        log.log(severity, f"{severity.name}\nof two lines")
    assert log.words() == "INTERNAL_ERROR of two lines; ERROR of two lines"
    log.clear()
    assert log.words() == ""
