"""CUDA graphs of the PyTorch engine against a stand-in for CUDA: what is captured when, and what a failure leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ddtree_trt.runtime.engines.torch.graphs import Graphs

CPU = torch.device("cpu")


class FakeCuda:
    """`torch.cuda` as far as captures go: a current stream, graphs that know whether they are being recorded, and
    failures on demand."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.stream, self.side = "main", 0
        self.recording: Any = None
        self.end_fails = False

    def install(self, patch: pytest.MonkeyPatch) -> None:
        cuda = self

        class Graph:
            def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
                assert cuda.stream != "main", "the main stream must not be captured: other work is on it"
                assert cuda.recording is None and capture_error_mode == "thread_local"
                cuda.recording = self
                cuda.log.append(("begin", pool, cuda.stream))

            def capture_end(self) -> None:
                assert cuda.recording is self
                cuda.recording = None
                cuda.log.append("end")
                if cuda.end_fails:
                    raise RuntimeError("operation failed due to a previous error during capture")

            def replay(self) -> None:
                assert cuda.stream == "main" and cuda.recording is None
                cuda.log.append("replay")

        @contextmanager
        def stream(other: str) -> Iterator[None]:
            before, self.stream = self.stream, other
            try:
                yield
            finally:
                self.stream = before

        def forbidden(*_: object, **__: object) -> None:
            pytest.fail("a capture needs no wait and no emptied cache")

        patch.setattr(torch.cuda, "graph_pool_handle", self._pool)
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "Stream", self._new_stream)
        patch.setattr(torch.cuda, "stream", stream)
        for name in ("graph", "synchronize", "empty_cache"):
            patch.setattr(torch.cuda, name, forbidden)

    def _pool(self) -> str:
        self.log.append("pool")
        return "pool"

    def _new_stream(self) -> str:
        self.side += 1
        return f"side {self.side}"

    def work(self, name: str) -> Any:
        return lambda: self.log.append((name, self.stream))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def test_a_stage_is_captured_at_its_first_use_and_replayed_after(cuda: FakeCuda) -> None:
    """Work runs once, is captured once, and from then on its graph runs."""
    graphs = Graphs(torch.device("cuda"))
    assert not graphs.replay("a")
    for key in ("a", "a", "b", "a"):
        graphs.run(key, cuda.work(key))
    begin = ("begin", "pool", "side 1")
    assert cuda.log == [
        "pool",
        *[("a", "main"), begin, ("a", "side 1"), "end", "replay"],
        *[("b", "main"), begin, ("b", "side 1"), "end", "replay"],
    ]
    assert len(graphs) == 2 and graphs.replay("b") and cuda.log[-1] == "replay"
    graphs.clear()
    assert not len(graphs)


def test_stages_of_one_engine_share_memory_and_stream(cuda: FakeCuda) -> None:
    first = Graphs(torch.device("cuda"))
    second = first.sharing()
    first.run("key", cuda.work("a"))
    second.run("key", cuda.work("b"))
    assert (len(first), len(second)) == (1, 1)
    assert [entry for entry in cuda.log if entry == "pool" or entry[0] == "begin"] == [
        "pool",
        *[("begin", "pool", "side 1")] * 2,
    ]
    first.clear()
    assert len(second) == 1 and second.replay("key")


@pytest.mark.parametrize("end_fails", [False, True])
def test_work_that_fails_while_it_is_captured_leaves_the_stream_as_it_was(cuda: FakeCuda, end_fails: bool) -> None:
    graphs = Graphs(torch.device("cuda"))
    graphs.run("good", cuda.work("good"))
    cuda.end_fails = end_fails

    def work() -> None:
        if cuda.recording is not None:
            raise ValueError("not while a graph is recorded")

    with pytest.raises(ValueError, match="not while a graph is recorded"):
        graphs.run("bad", work)
    assert cuda.stream == "main" and cuda.recording is None
    assert len(graphs) == 1 and not graphs.replay("bad")
    cuda.end_fails = False
    graphs.run("good", cuda.work("good"))
    assert cuda.log[-1] == "replay"
    graphs.run("other", cuda.work("other"))
    assert len(graphs) == 2


def test_a_capture_that_cannot_be_ended_leaves_the_stream_as_it_was(cuda: FakeCuda) -> None:
    graphs = Graphs(torch.device("cuda"))
    cuda.end_fails = True
    with pytest.raises(RuntimeError, match="previous error during capture"):
        graphs.run("bad", cuda.work("bad"))
    assert cuda.stream == "main" and cuda.recording is None and not len(graphs)


def test_nothing_is_captured_on_a_cpu() -> None:
    calls: list[int] = []
    graphs = Graphs(CPU)
    for _ in range(3):
        graphs.run("key", lambda: calls.append(1))
    assert len(calls) == 3 and not len(graphs)
