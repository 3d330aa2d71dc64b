"""Builds that are interrupted, killed or run twice, and how much memory one takes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from build_faults import OldEngine, assert_refused, build_args, fingerprint
from checkpoints import make_pair
from command_line import Cli

from ddtree_trt.artifact.files import MANIFEST
from ddtree_trt.build.compile import BuildRequest, compile_engine

# Interruptions

SLOW_BUILD = """
import re
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background starts with it ignored
from ddtree_trt.build.graph.weights import WeightFile
write, count = WeightFile._write, 0
def slow(self, key, array):
    global count
    count += 1
    if count == 20:
        print("in the middle", flush=True)
        time.sleep(600)
    return write(self, key, array)
WeightFile._write = slow
from ddtree_trt.cli import main
main()
"""


def interrupt_build(args: list[object], signal_number: int) -> subprocess.CompletedProcess[str]:
    """Start a build, wait until it is in the middle of the weights, and send it a signal."""
    command = [sys.executable, "-c", SLOW_BUILD, *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in the middle\n", process.communicate()
        process.send_signal(signal_number)
        out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_ctrl_c_in_the_middle_of_a_build(pair: tuple[Path, Path], old: OldEngine) -> None:
    run = interrupt_build(build_args(pair, old.path, "--force"), signal.SIGINT)
    assert (run.returncode, run.stdout) == (130, "")
    assert re.fullmatch(r"backend onnxruntime: [^\n]+\n", run.stderr), run.stderr
    old.assert_untouched()
    run = interrupt_build(build_args(pair, old.path.with_name("new")), signal.SIGINT)
    assert run.returncode == 130
    old.assert_untouched()


def test_sigkill_in_the_middle_of_a_build(cli: Cli, pair: tuple[Path, Path], old: OldEngine) -> None:
    run = interrupt_build(build_args(pair, old.path, "--force"), signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL
    left = [p for p in old.path.parent.iterdir() if p != old.path]
    assert [p.name.startswith(".mine.tmp-") for p in left] == [True]
    assert not (left[0] / MANIFEST).exists()
    assert_refused(cli("inspect", left[0]), 1, "is not an engine directory")
    assert fingerprint(old.path) == old.before

    # The next build of that name removes what was left.
    assert cli(*build_args(pair, old.path, "--force"))[0] == 0
    assert [p.name for p in old.path.parent.iterdir()] == [old.path.name]


def test_a_running_build_survives_another_of_the_same_name(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Two builds at once: neither removes the other's files, and the last to end replaces nothing by accident."""
    engine = tmp_path / "engines" / "mine"
    code = SLOW_BUILD.replace("time.sleep(600)", "sys.stdin.read()")
    command = [sys.executable, "-c", code, *map(str, build_args(pair, engine))]
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **streams) as slow:
        assert slow.stdout is not None
        assert slow.stdout.readline() == "in the middle\n"
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
def test_peak_memory_is_below_two_and_a_half_times_the_weights(tmp_path: Path) -> None:
    """Against the checkpoint's bfloat16, half of what is written. VmHWM, because ru_maxrss is inherited over exec."""
    dims: dict[str, Any] = {"hidden_size": 1024, "num_layers": 5, "num_heads": 16, "num_kv_heads": 8, "head_dim": 64}
    pair = make_pair(tmp_path / "pair", dtype="bf16", vocab_size=16384, intermediate_size=3072, **dims)
    weights = sum((directory / "model.safetensors").stat().st_size for directory in pair)
    assert weights > 200e6
    command = [sys.executable, "-c", MEASURE, *map(str, pair), str(tmp_path / "engine")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(run.stdout)
    assert result["written"] > 1.9 * weights
    assert result["peak"] < 2.5 * weights, result
