"""Builds that fail, die, are interrupted or run twice: one line, no half engine, an old one untouched; and memory."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build_faults import OldEngine, assert_refused, build_args
from checkpoints import TARGET_DIMS, make_drafter, make_pair, make_target, random_weights, write_safetensors
from command_line import Cli
from gguf_files import make_gguf

from ddtree_trt.artifact.files import MANIFEST
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.verify import verify_files
from ddtree_trt.build import compile as compiler
from ddtree_trt.build import directory as writer
from ddtree_trt.build.backends.onnxruntime.backend import OnnxRuntimeBuild
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.build.directory import atomic_directory, prepare_destination
from ddtree_trt.build.graph.weights import WeightFile
from ddtree_trt.drafters.registry import checkpoint_shapes
from ddtree_trt.errors import BuildError, UsageError


def test_a_damaged_engine_can_be_rebuilt_in_place(cli: Cli, pair: tuple[Path, Path], old: OldEngine) -> None:
    (old.path / "weights.bin").unlink()
    rebuild = "rebuild with: ddtree-trt build --target mine --checkpoint DIR --drafter DIR"
    assert_refused(cli("inspect", old.path), 1, "weights.bin is missing", rebuild)
    (old.path / MANIFEST).write_text("{")
    assert_refused(cli("inspect", old.path), 1, "not valid JSON", "rebuild the engine")
    status, out, err = cli(*build_args(pair, old.path, "--force"))
    assert status == 0 and err.startswith("backend onnxruntime: ") and str(old.path) in out
    verify_files(old.path, load_manifest(old.path))


# Checkpoints that cannot be used: refused before the engine directory is touched


def not_finite(target: Path) -> None:
    weights = random_weights(checkpoint_shapes(TARGET_DIMS, tied=True), seed=0)
    weights["model.layers.2.mlp.down_proj.weight"][3, 1] = np.nan
    write_safetensors(target / "model.safetensors", weights, "fp16")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda t, d: (t / "tokenizer.json").unlink(), ["has no tokenizer", "tokenizer.json is missing"]),
        (lambda t, d: not_finite(t), ["model.layers.2.mlp.down_proj.weight[3, 1] is nan", "must be finite"]),
        (
            lambda t, d: make_drafter(d, num_target_layers=36, tap_layers=(1, 9)),
            ["num_target_layers is 36, the target's layers 3", "use the drafter trained for this target"],
        ),
        (
            lambda t, d: os.truncate(d / "model.safetensors", 9000),
            ["the file is damaged or cut short, fetch the checkpoint again"],
        ),
    ],
)
def test_unusable_pair(
    cli: Cli, pair: tuple[Path, Path], old: OldEngine, fault: Callable[[Path, Path], object], words: list[str]
) -> None:
    fault(*pair)
    assert_refused(cli(*build_args(pair, old.path, "--force")), 1, *words)
    old.assert_untouched()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["nothing to build", "tiny, tiny-dspark, tiny-eagle3, tiny-hybrid, smollm2-135m"]),
        (["--target", "gemma-2b"], ["unknown target 'gemma-2b'", "no other architecture is supported"]),
        (["--target", "x\x1b[2J"], ["'x\\x1b[2J' cannot name an engine"]),
        (["--checkpoint", "somewhere"], ["--checkpoint without --target needs --drafter PATH too"]),
        (["--target", "tiny", "--attention", "native"], ["--attention is for --backend tensorrt, not for"]),
        (
            ["--target", "tiny", "--backend", "onnxruntime", "--gpu", "sm89"],
            ["--gpu is for --backend tensorrt-rtx, not for onnxruntime; leave it out"],
        ),
        (["--target", "tiny", "--backend", "abacus"], ["--backend", "abacus"]),
        (["--target", "tiny", "--precision", "fp16"], ["precision 'fp16' is not available"]),
        (["--target", "tiny", "--max-seq-len", "1000000"], ["--max-seq-len 1000000", "positions"]),
        (["--target", "tiny", "--max-tree-budget", "0"], ["max_tree_budget must be from 1 to 4096, not 0"]),
        (["--target", "tiny", "--colour"], ["--colour"]),
    ],
)
def test_misuse(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(cli("build", *args), 2, *words)
    assert not list(tmp_path.rglob("*.bin"))


@pytest.mark.parametrize(("backend", "module"), [("tensorrt", "tensorrt"), ("tensorrt-rtx", "tensorrt_rtx")])
def test_a_backend_that_is_not_installed(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, module: str
) -> None:
    for name in (module, f"{module}_bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    result = cli("build", "--target", "tiny", "--backend", backend, "--output", tmp_path / "e")
    words = [f"the {backend} backend cannot import {module}", f"pip install --editable '.[{backend}]'"]
    assert_refused(result, 1, *words)
    assert list(tmp_path.iterdir()) == []


def test_a_block_longer_than_a_pass(tmp_path: Path) -> None:
    pair = make_target(tmp_path / "t"), make_drafter(tmp_path / "d", block_size=300)
    request = BuildRequest(target="mine", checkpoint=pair[0], drafter=pair[1], output=tmp_path / "e")
    with pytest.raises(UsageError, match=r"block has 300 tokens, .* give --max-tree-budget 300"):
        compile_engine(BuildRequest(**{**vars(request), "max_tree_budget": 298}))
    assert compile_engine(BuildRequest(**{**vars(request), "max_tree_budget": 300})).drafting.dims.block_size == 300


def no_space(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", [(WeightFile, "_write"), (WeightFile, "close"), (compiler, "copy_tokenizer")])
def test_disk_full_while_writing(
    cli: Cli, pair: tuple[Path, Path], old: OldEngine, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    monkeypatch.setattr(*where, no_space)
    result = cli(*build_args(pair, old.path, "--force"))
    assert_refused(result, 1, "No space left on device; nothing was changed, free some space")
    old.assert_untouched()


def test_too_little_space_is_seen_before_any_work(
    cli: Cli, pair: tuple[Path, Path], old: OldEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(old.path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr(OnnxRuntimeBuild, "write", lambda *args: pytest.fail("work was done"))
    assert_refused(cli(*build_args(pair, old.path, "--force")), 1, "MB free", "--output DIR on another disk")
    old.assert_untouched()


def test_an_unexpected_error_is_one_line_too(
    cli: Cli, pair: tuple[Path, Path], old: OldEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnnxRuntimeBuild, "write", lambda *args: 1 / 0)
    args = build_args(pair, old.path, "--force")
    assert_refused(cli(*args), 1, "unexpected ZeroDivisionError", "--debug")
    status, _, err = cli("--debug", *args)
    assert status == 1 and "Traceback" in err and err.splitlines()[-1].startswith("error: unexpected")
    old.assert_untouched()


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


# An engine directory appears whole or not at all


def write_engine(destination: Path, content: str, *, force: bool = False) -> None:
    with atomic_directory(destination, force=force) as temporary:
        (temporary / "data").write_text(content)
        assert not (destination / "data").exists() or (destination / "data").read_text() != content
        (temporary / MANIFEST).write_text("{}")


def hidden(parent: Path) -> list[str]:
    return [p.name for p in parent.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("exchange", [True, False])
def test_new_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr("ctypes.CDLL", lambda *args, **kwargs: object())
    destination = tmp_path / "deep" / "engine"
    destination.mkdir(parents=True)  # an empty directory is no engine
    write_engine(destination, "one")
    write_engine(destination, "two", force=True)
    assert (destination / "data").read_text() == "two"
    assert hidden(destination.parent) == []
    umask = os.umask(0o22)
    os.umask(umask)
    assert destination.stat().st_mode & 0o777 == 0o777 & ~umask


WRITER = """
import sys, time
from pathlib import Path
from ddtree_trt.build.directory import atomic_directory
print("ready", flush=True)
while True:
    with atomic_directory(Path(sys.argv[1]), force=True) as directory:
        for name in sys.argv[2:]:
            (directory / name).write_text("whole")
            time.sleep(0.001)
"""


@pytest.mark.parametrize("cases", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_builds_that_die_at_any_moment(tmp_path: Path, cases: int) -> None:
    """No half engine: what has its name is whole. One leftover at most, which the next build removes."""
    place, names, rng = tmp_path / "mine", ("data", "more", MANIFEST), random.Random(0)
    for number in rng.choices((signal.SIGKILL, signal.SIGTERM, signal.SIGINT), k=cases):
        if rng.random() < 0.5:
            shutil.rmtree(place, ignore_errors=True)
        before = place.exists()
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, place, *names], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout and process.stdout.readline()
            time.sleep(rng.uniform(0, 0.02))
            process.send_signal(number)
        assert len(hidden(tmp_path)) <= 1 and place.exists() >= before
        if place.exists():
            assert {path.name: path.read_text() for path in place.iterdir()} == dict.fromkeys(names, "whole")
    write_engine(place, "one", force=True)
    assert hidden(tmp_path) == []


def test_a_link_to_an_engine_keeps_pointing_at_it(tmp_path: Path) -> None:
    write_engine(tmp_path / "engine", "one")
    (tmp_path / "link").symlink_to("engine")
    write_engine(tmp_path / "link", "two", force=True)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "engine" / "data").read_text() == "two"


def test_what_another_build_has_written_meanwhile_stays(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"cannot write .*; nothing was changed"):  # noqa: SIM117
        with atomic_directory(tmp_path / "engine", force=False) as temporary:
            (temporary / "data").write_text("slow")
            write_engine(tmp_path / "engine", "one")
    assert (tmp_path / "engine" / "data").read_text() == "one" and hidden(tmp_path) == []


def test_what_must_not_be_replaced(tmp_path: Path) -> None:
    write_engine(tmp_path / "engine", "one")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    (tmp_path / "file").write_text("text")
    for name, force, message in (
        ("engine", False, "give --force to replace it"),
        ("home", True, "was not written by ddtree-trt"),
        ("file", True, "is not a directory"),
        ("/proc/engine", False, "cannot write /proc/engine: .*; nothing was changed, choose another path"),
        ("file/engine", True, "cannot write .*/engine: .*/file is not a directory"),
    ):
        with pytest.raises(BuildError, match=message):
            prepare_destination(tmp_path / name, force=force)
    assert (tmp_path / "home" / "letter").exists()


def test_a_failed_exchange_puts_the_old_engine_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = tmp_path / "engine"
    write_engine(destination, "old")
    monkeypatch.setattr("ctypes.CDLL", lambda *args, **kwargs: object())
    rename, calls = os.rename, []

    def failing(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr("os.rename", failing)
    with pytest.raises(BuildError, match="Input/output error"):
        write_engine(destination, "new", force=True)
    assert (destination / "data").read_text() == "old"
    assert hidden(tmp_path) == []


def test_leftovers_of_killed_builds_are_removed_and_nothing_else(tmp_path: Path) -> None:
    stale = tmp_path / ".engine.tmp-4711-00ff"  # below: a build that is running, of another name, none of ours
    others = [tmp_path / name for name in (".engine.tmp-4712-00ff", ".engine2.tmp-4711-00ff", ".engine.tmp-note")]
    for path in (stale, *others):
        path.mkdir()
        (path / "data").write_text("x")
    (tmp_path / ".engine.tmp-4713-0001").symlink_to(others[2])
    lock = writer._lock(others[0])
    write_engine(tmp_path / "engine", "one")
    assert not stale.exists() and all((path / "data").exists() for path in others)
    os.close(lock)
    write_engine(tmp_path / "engine", "two", force=True)
    assert not others[0].exists()


def test_an_engine_moved_aside_by_a_killed_build_comes_back(tmp_path: Path) -> None:
    write_engine(tmp_path / "engine", "old")
    (tmp_path / "engine").rename(tmp_path / ".engine.tmp-4711-00ff.old")
    with pytest.raises(BuildError, match="--force"):
        prepare_destination(tmp_path / "engine", force=False)
    assert (tmp_path / "engine" / "data").read_text() == "old"
