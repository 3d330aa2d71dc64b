"""Faults in builds and built engines: one clear line, exit code 1 or 2, no half engine, an old one untouched."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build_faults import OldEngine, assert_refused, build_args
from checkpoints import TARGET_DIMS, edit_json, make_drafter, make_target, random_weights, write_safetensors
from command_line import Cli

from ddtree_trt.artifact.files import MANIFEST
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.verify import verify_files
from ddtree_trt.build import compile as compiler
from ddtree_trt.build.backends.onnxruntime.backend import OnnxRuntimeBuild
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.build.graph.weights import WeightFile
from ddtree_trt.errors import UsageError
from ddtree_trt.models.decoder import language_model_shapes

# Damaged engines


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
    weights = random_weights(language_model_shapes(TARGET_DIMS, tied=True), seed=0)
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
        (
            lambda t, d: edit_json(t / "config.json", model_type="mixtral_moe"),
            ["mixtral_moe", "mixture of experts is not supported"],
        ),
    ],
)
def test_unusable_pair(
    cli: Cli, pair: tuple[Path, Path], old: OldEngine, fault: Callable[[Path, Path], object], words: list[str]
) -> None:
    fault(*pair)
    assert_refused(cli(*build_args(pair, old.path, "--force")), 1, *words)
    old.assert_untouched()
    assert_refused(cli(*build_args(pair, old.path.with_name("new"))), 1, *words)
    old.assert_untouched()


# Wrong calls


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["nothing to build", "tiny, tiny-dspark, tiny-eagle3, smollm2-135m"]),
        (["--target", "gemma-2b"], ["unknown target 'gemma-2b'", "no other architecture is supported"]),
        (["--target", "x\x1b[2J"], ["'x\\x1b[2J' cannot name an engine"]),
        (["--target", "../up"], ["cannot name an engine"]),
        (["--checkpoint", "somewhere"], ["--checkpoint without --target needs --drafter PATH too"]),
        (["--target", "tiny", "--attention", "native"], ["--attention is for --backend tensorrt, not for"]),
        (["--target", "tiny", "--backend", "abacus"], ["--backend", "abacus"]),
        (["--target", "tiny", "--precision", "fp16"], ["precision 'fp16' is not available"]),
        (["--target", "tiny", "--max-seq-len", "1000000"], ["--max-seq-len 1000000", "positions"]),
        (["--target", "tiny", "--max-seq-len", "1"], ["--max-seq-len must be 2 to 134217728, not 1"]),
        (["--target", "tiny", "--max-tree-budget", "-1"], ["--max-tree-budget must be 1 to 4096"]),
        (["--target", "tiny", "--max-tree-budget", "0"], ["--max-tree-budget must be 1 to 4096, not 0", "--method ar"]),
        (["--target", "tiny", "--max-tree-budget", "5000"], ["--max-tree-budget must be 1 to 4096"]),
        (["--target", "tiny", "--max-batch", "0"], ["--max-batch must be 1 to 1024"]),
        (["--target", "tiny", "--max-batch", "many"], ["--max-batch", "integer"]),
        (["--target", "tiny", "--colour"], ["--colour"]),
    ],
)
def test_wrong_call(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(cli("build", *args), 2, *words)
    assert not list(tmp_path.rglob("*.bin"))


def test_a_backend_that_is_not_installed(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    result = cli("build", "--target", "tiny", "--backend", "tensorrt", "--output", tmp_path / "e")
    assert_refused(result, 1, "cannot import tensorrt", "pip install --editable '.[tensorrt]'")
    assert list(tmp_path.iterdir()) == []


def test_a_block_longer_than_a_pass(tmp_path: Path) -> None:
    pair = make_target(tmp_path / "t"), make_drafter(tmp_path / "d", block_size=300)
    request = BuildRequest(target="mine", checkpoint=pair[0], drafter=pair[1], output=tmp_path / "e")
    with pytest.raises(UsageError, match=r"block has 300 tokens, .* give --max-tree-budget 300"):
        compile_engine(BuildRequest(**{**vars(request), "max_tree_budget": 298}))
    assert compile_engine(BuildRequest(**{**vars(request), "max_tree_budget": 300})).drafting.dims.block_size == 300


# The output


def no_space(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "where", [(WeightFile, "_write"), (WeightFile, "close"), (compiler, "copy_tokenizer"), (Path, "write_bytes")]
)
def test_disk_full_while_writing(
    cli: Cli, pair: tuple[Path, Path], old: OldEngine, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    monkeypatch.setattr(*where, no_space)
    result = cli(*build_args(pair, old.path, "--force"))
    assert_refused(result, 1, "No space left on device; nothing was changed, free some space")
    assert_refused(cli(*build_args(pair, old.path.with_name("new"))), 1, "No space left on device")
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
