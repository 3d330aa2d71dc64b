"""`bench` on the PyTorch engine: random pairs made on the device, and rounds on the device beside those of the host."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.bench.pairs.random_pair import find_shape
from ddtree_trt.bench.pairs.random_torch import random_torch_engine
from ddtree_trt.bench.reporting.markdown import markdown
from ddtree_trt.bench.result import read_result, to_json
from ddtree_trt.bench.runner import run_bench
from ddtree_trt.bench.settings import BenchSettings, CheckSettings
from ddtree_trt.check.run import check_engine
from ddtree_trt.cli import app
from ddtree_trt.errors import MissingDependency, UsageError

RANDOM = BenchSettings(
    "micro",
    random_weights=True,
    backend="torch",
    forced_acceptance=3,
    budgets=(16,),
    limit=1,
    max_tokens=13,
    prompt_tokens=20,
    threads=1,
)


def test_a_random_pair_is_measured_on_the_host_and_on_the_device(tmp_path: Path) -> None:
    """By the same labels in tables and in JSON as one of the other backend: nobody takes it for a trained pair."""
    result = run_bench(dataclasses.replace(RANDOM, device_rounds="both"))
    lengths = {s.case: s.acceptance_lengths for s in result.samples}
    assert lengths == {"ar": (1,) * 12, "dflash": (3,) * 4, "ddtree@16": (3,) * 4, "ddtree@16+device": (3,) * 4}
    stages = {s.case: sum(s.stage_s.values()) for s in result.samples}
    assert stages["ddtree@16"] > 0 == stages["ddtree@16+device"]
    assert (result.engine.backend, result.engine.name, result.engine.target) == ("torch", "random-micro", "random")
    text = markdown(result)
    assert "Random weights of shape micro: only times mean anything." in text
    assert "Forced acceptance" in text and "+device: the whole round stays on the device" in text
    assert json.loads(to_json(result))["settings"]["random_weights"] is True
    path = tmp_path / "r.json"
    path.write_text(to_json(result), encoding="utf-8")
    again = read_result(path)
    assert (again.settings, again.cases, again.engine) == (result.settings, result.cases, result.engine)


def test_without_forcing_it_is_lossless() -> None:
    result = run_bench(dataclasses.replace(RANDOM, forced_acceptance=None, device_rounds="both"))
    assert len({s.output_digest for s in result.samples}) == 1


def test_nothing_is_left_of_a_random_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_bench(RANDOM)
    assert not list(tmp_path.iterdir())


def test_a_shape_too_large_for_the_device_is_refused() -> None:
    """Before anything is made."""
    limits = Limits(max_seq_len=128, max_batch=10**9)
    with pytest.raises(UsageError, match=r"random-micro in fp32 takes about .* GB, and cpu has .* choose a smaller"):
        random_torch_engine("micro", find_shape("micro"), "fp32", limits, torch.device("cpu"))


def test_torch_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        MissingDependency,
        match=r"are made by it and PyTorch is not installed; run in a checkout of ddtree-trt: pip install",
    ):
        run_bench(RANDOM)


def test_the_command_takes_both(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    words = "bench --random-weights micro --backend torch --device-rounds on --budgets 8 --limit 1 --max-tokens 6"
    run = CliRunner().invoke(app, [*words.split(), "--prompt-tokens", "9", "--threads", "1", "--json", str(path)])
    assert run.exit_code == 0, run.output
    assert [c.label for c in read_result(path).cases] == ["ar", "dflash", "ddtree@8+device"]


def test_check_covers_device_rounds(tmp_path: Path) -> None:
    from engine_builds import PACKAGED, build_torch_engine

    build_torch_engine(PACKAGED / "target", PACKAGED / "drafter", tmp_path / "e").close()
    report = check_engine(CheckSettings(str(tmp_path / "e"), limit=2, max_tokens=24, seeds=0, threads=1))
    assert report.passed
    by_case = {f.case: f for f in report.greedy}
    assert by_case["ddtree@16+device"].tau == by_case["ddtree@16"].tau > 3
