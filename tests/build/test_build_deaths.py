"""Builds that die at any moment."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_trt.artifact.files import MANIFEST
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.verify import verify_files

# Death at random moments

BUILDER = """
import os, signal, sys, time
from pathlib import Path
import onnxruntime, transformers.tokenization_utils_fast
from ddtree_trt.build.backends.onnxruntime import backend as _
from ddtree_trt.build.checkpoint import reader as checkpoint
from ddtree_trt.build.graph import networks as graph
from ddtree_trt.build.graph import weights
from ddtree_trt.artifact import template_arguments
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.errors import DDTreeError
target, drafter, output = map(Path, sys.argv[1:])
for line in sys.stdin:
    number, delay, force = line.split()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            request = BuildRequest("mine", target, drafter, output=output, force=force == "1")
            compile_engine(request)
        except BaseException:
            os._exit(1)
        os._exit(0)
    if int(number):
        time.sleep(float(delay))
        os.kill(child, int(number))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Builder:
    """Builds an engine in processes that are forked from one that has everything imported."""

    def __init__(self, pair: tuple[Path, Path], output: Path) -> None:
        command = [sys.executable, "-c", BUILDER, *map(str, (*pair, output))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def build(self, number: int = 0, after_s: float = 0.0, *, force: bool) -> int:
        """The exit code of a build that gets a signal after a while; 0 sends none."""
        assert self.process.stdin and self.process.stdout
        print(number, after_s, int(force), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())


@pytest.fixture
def builder(pair: tuple[Path, Path], tmp_path: Path) -> Iterator[Builder]:
    builder = Builder(pair, tmp_path / "out" / "mine")
    with builder.process:
        yield builder
        assert builder.process.stdin
        builder.process.stdin.close()


@pytest.mark.parametrize("cases", [30, pytest.param(400, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("over", ["nothing", "an engine"])
def test_builds_that_die_at_any_moment(builder: Builder, tmp_path: Path, over: str, cases: int) -> None:
    """No half engine: what has its name is whole. One leftover at most, which the next build removes."""
    place, rng, whole, died = tmp_path / "out" / "mine", random.Random(over), 0, 0
    assert builder.build(force=False) == 0
    reference = {path.name: path.read_bytes() for path in place.iterdir() if path.name != MANIFEST}
    for _ in range(cases):
        if over == "nothing":
            for path in (*place.glob("*"), *([place] if place.exists() else [])):
                path.rmdir() if path.is_dir() else path.unlink()
        number = rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
        died += builder.build(number, rng.uniform(0, 0.15), force=True) != 0
        beside = [path.name for path in place.parent.iterdir() if path != place]
        assert len(beside) <= 1 and all(name.startswith(".mine.tmp-") for name in beside)
        assert over == "nothing" or place.exists()
        if place.exists():
            whole += 1
            verify_files(place, load_manifest(place))
            assert {path.name: path.read_bytes() for path in place.iterdir() if path.name != MANIFEST} == reference
    assert died and (over == "nothing" or whole == cases)
    assert builder.build(force=True) == 0
    assert [path.name for path in place.parent.iterdir()] == ["mine"]
