"""Builds that die at any moment, are interrupted or run twice, and how much memory one takes."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from build_faults import OldEngine, assert_refused, build_args, fingerprint
from checkpoints import make_pair
from gguf_files import make_gguf

from ddtree_trt.artifact.files import MANIFEST
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.verify import verify_files
from ddtree_trt.build.compile import BuildRequest, compile_engine

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


# Interruptions

SLOW_BUILD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background starts with it ignored
from ddtree_trt.build.graph.weights import WeightFile
write, count = WeightFile._write, 0
def slow(self, key, array):
    global count
    count += 1
    if count == 20:
        print("in the middle", flush=True)
        sys.stdin.read()
    return write(self, key, array)
WeightFile._write = slow
from ddtree_trt.cli import main
main()
"""


@contextmanager
def in_the_middle(*args: object) -> Iterator[subprocess.Popen[str]]:
    """A build that has written some weights and waits to read all of stdin."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SLOW_BUILD, *map(str, args)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in the middle\n", process.communicate()
        yield process


def test_ctrl_c_in_the_middle_of_a_build(pair: tuple[Path, Path], old: OldEngine) -> None:
    with in_the_middle(*build_args(pair, old.path, "--force")) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (130, "")
    assert re.fullmatch(r"backend onnxruntime: [^\n]+\n", err), err
    old.assert_untouched()


def test_a_running_build_survives_another_of_the_same_name(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Two builds at once: neither removes the other's files, and the last to end replaces nothing by accident."""
    engine = tmp_path / "engines" / "mine"
    with in_the_middle(*build_args(pair, engine)) as slow:
        compile_engine(BuildRequest(target="mine", checkpoint=pair[0], drafter=pair[1], output=engine))
        before = fingerprint(engine)
        out, err = slow.communicate(timeout=300)
    assert_refused((slow.returncode, out, err), 1, f"cannot write {engine}", "nothing was changed")
    assert fingerprint(engine) == before
    assert [p.name for p in engine.parent.iterdir()] == ["mine"]


# Memory

MEASURE = """
import json, re, sys
from pathlib import Path
from ddtree_trt.build.compile import BuildRequest, compile_engine
target, drafter, output = map(Path, sys.argv[1:])
manifest = compile_engine(BuildRequest(target="mine", checkpoint=target, drafter=drafter, output=output))
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
print(json.dumps({"peak": peak, "written": manifest.files["weights.bin"].size}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_peak_memory_is_below_two_and_a_half_times_the_weights(tmp_path: Path, form: str) -> None:
    """Against the checkpoint's bfloat16, half of what is written. VmHWM, because ru_maxrss is inherited over exec."""
    dims: dict[str, Any] = {"hidden_size": 1024, "num_layers": 5, "num_heads": 16, "num_kv_heads": 8, "head_dim": 64}
    pair = make_pair(tmp_path / "pair", dtype="bf16", vocab_size=16384, intermediate_size=3072, **dims)
    weights = sum((directory / "model.safetensors").stat().st_size for directory in pair)
    assert weights > 200e6
    if form == "gguf":
        pair = make_gguf(pair[0], tmp_path / "model.gguf", "BF16"), pair[1]
    command = [sys.executable, "-c", MEASURE, *map(str, pair), str(tmp_path / "engine")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(run.stdout)
    assert result["written"] > 1.9 * weights
    assert result["peak"] < 2.5 * weights, result
