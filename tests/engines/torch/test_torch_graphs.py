"""CUDA graphs of the PyTorch engine against a stand-in for CUDA: what is captured when, and what a failure leaves."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from ddtree_trt.runtime.engines.torch.graphs import Graphs

BEGIN = ("begin", "pool", "side")


class FakeCuda:
    """`torch.cuda` as far as captures go: a current stream, graphs that know whether they are being recorded, and
    failures on demand."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.stream = "main"
        self.recording: Any = None
        self.end_fails = False
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

        def make(name: str) -> str:
            self.log.append(name)
            return name

        fakes: dict[str, Any] = {"graph_pool_handle": partial(make, "pool"), "Stream": partial(make, "side")}
        fakes |= {"CUDAGraph": Graph, "stream": stream}
        fakes |= dict.fromkeys(("graph", "synchronize", "empty_cache"))  # a capture needs none of them
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)

    def work(self, name: str) -> Any:
        return lambda: self.log.append((name, self.stream))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_a_stage_is_captured_at_its_first_use_and_replayed_after(cuda: FakeCuda) -> None:
    """Work runs once, is captured once, and from then on its graph runs. All share one pool and one stream."""
    graphs = Graphs(torch.device("cuda"))
    for key in ("a", "a", "b", "a"):
        graphs.run(key, cuda.work(key))
    assert cuda.log == [
        *[("a", "main"), "pool", "side", BEGIN, ("a", "side"), "end", "replay"],
        *[("b", "main"), BEGIN, ("b", "side"), "end", "replay"],
    ]


@pytest.mark.parametrize(("work_fails", "end_fails"), [(True, False), (True, True), (False, True)])
def test_a_capture_that_fails_leaves_the_stream_as_it_was(cuda: FakeCuda, work_fails: bool, end_fails: bool) -> None:
    """The work's own error is told, and the other graphs go on."""
    graphs = Graphs(torch.device("cuda"))
    graphs.run("good", cuda.work("good"))

    def work() -> None:
        if work_fails and cuda.recording is not None:
            raise RuntimeError("not while a graph is recorded")

    cuda.end_fails = end_fails
    with pytest.raises(RuntimeError, match="not while a graph" if work_fails else "previous error during capture"):
        graphs.run("bad", work)
    assert cuda.stream == "main" and cuda.recording is None and len(graphs) == 1
    cuda.end_fails = False
    graphs.run("good", cuda.work("good"))
    assert cuda.log[-1] == "replay"
    graphs.run("other", cuda.work("other"))
    assert len(graphs) == 2


@pytest.mark.parametrize(("device", "capture"), [("cpu", True), ("cuda", False)])
def test_nothing_is_captured_on_a_cpu_or_with_other_ranks(device: str, capture: bool) -> None:
    calls: list[int] = []
    graphs = Graphs(torch.device(device), capture=capture)
    for _ in range(3):
        graphs.run("key", lambda: calls.append(1))
    assert len(calls) == 3 and not len(graphs)
