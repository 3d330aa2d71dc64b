"""tools/gpu_bench.sh, the one script for a GPU machine, run dry: on the CPU, with tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddtree_trt.runtime.stats import ROUND_STAGES
from tools.gpu import bench

ROOT = Path(__file__).resolve().parents[2]


def test_dry_run(tmp_path: Path) -> None:
    command = [str(ROOT / "tools" / "gpu_bench.sh"), "--dry-run", str(tmp_path)]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads((tmp_path / "gpu_bench.json").read_text())
    assert (result["schema_version"], result["dry_run"]) == (1, True)
    assert all(outcome.startswith("ok") for outcome in result["steps"].values())
    assert result["machine"]["torch"] and result["machine"]["kernels"] is None
    for precision in ("fp32", "bf16"):
        assert result["correctness"][precision]["outputs"] == 7
        assert result["correctness"][precision]["relative_error"] < 0.15
    assert result["two_gpus"]["outputs"] == 4 and result["two_gpus"]["differ_at_a_tie"] == 0
    assert set(result["ceilings"]) == {"copy_gb_per_s", "bf16_tflop_per_s"}
    (pair,) = result["pairs"]
    assert pair["shape"] == "micro" and pair["weight_bytes"] > 0
    # Two bytes for each of 6 layers' keys and values of 2 heads of 16.
    assert pair["kv_bytes_per_token"] == 2 * 6 * 2 * 2 * 16
    assert [run["past"] for run in pair["runs"]] == [16, 40]
    for run in pair["runs"]:
        check_times(run["ar"])
        check_times(run["dflash"])
        assert run["ar"]["tokens_per_round"] == 1
        assert [row["budget"] for row in run["ddtree"]] == [3, 15]
        for row in run["ddtree"]:
            check_times(row["host"])
            assert 1 <= row["device"]["tokens_per_round"] <= 1 + row["budget"]
            assert row["device"]["round_ms"] > 0 and row["device"]["visible_round_ms"] > 0
            assert set(row["device"]["stage_ms"]) == {"draft", "rest"}
    (batch,) = result["batches"]
    assert {(row["slots"], row["tokens"]) for row in batch["rounds"]} == {(n, 1 << i) for n in (1, 2) for i in range(7)}
    assert all(row["draft_ms"] > 0 and row["rest_ms"] > 0 for row in batch["rounds"])
    assert all(step["slots"] == 2 and step["step_ms"] > 0 < step["graphs_ms"] for step in batch["steps"].values())
    cases = {"ar+device", "dflash+device", "ddtree@auto+device", "ddtree@4+device"}
    assert set(result["tokens_per_second"]) == cases and min(result["tokens_per_second"].values()) > 0
    assert len(result["targets"]) == 6 + 2 + 1


def check_times(timed: dict[str, Any]) -> None:
    assert 0 < timed["round_ms"]["low"] <= timed["round_ms"]["median"] <= timed["round_ms"]["high"]
    assert set(timed["stage_ms"]) == set(ROUND_STAGES)


def test_targets_are_judged() -> None:
    """An 8B pair by made-up figures: one target just met, the others just missed."""
    run = {
        "past": 1024,
        "ar": {"round_ms": {"median": 4.0}},
        "ddtree": [
            {"budget": 15, "host": None, "device": None},
            {"budget": 63, "host": {"round_ms": {"median": 6.5}}, "device": {"round_ms": 5.5, "gap_us": 51.0}},
        ],
    }
    pair = {"shape": "qwen3-8b", "weight_bytes": 15.0e9, "kv_bytes_per_token": 147456, "runs": [run]}
    rows = bench.targets({"ceilings": {"copy_gb_per_s": 4300.0}, "pairs": [pair]})
    found = {row["what"]: (round(row["found"], 3), row["met"]) for row in rows}
    assert found == {
        "ar step over the time to read weights and cache": (1.135, True),
        "ddtree round over ar step": (1.375, True),
        "gap between rounds the host sees, us": (51.0, False),
        "ddtree round, ms": (5.5, True),
    }
    steps = {"ar": {"slots": 64, "step_ms": 12.0, "graphs_ms": 9.0}, "ddtree": None}
    speeds = {"ar+device": 100.0, "ddtree@auto+device": 300.0, "ddtree@16+device": 306.0}
    rows = bench.targets({"pairs": [], "batches": [{"shape": "s", "steps": steps}], "tokens_per_second": speeds})
    assert [(row["what"], round(row["found"], 3), row["met"]) for row in rows] == [
        ("step over its graphs", 1.333, False),
        ("best fixed budget over auto", 1.02, True),
    ]


def test_a_part_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    report = bench.Report(tmp_path / "r.json", {"schema_version": 1}, minutes=1)
    assert report.step("good", lambda: 5) == 5
    assert report.step("bad", lambda: 1 / 0) is None
    assert report.failed
    steps = json.loads((tmp_path / "r.json").read_text())["steps"]
    assert steps["good"].startswith("ok") and steps["bad"].startswith("failed: ZeroDivisionError")
    late = bench.Report(tmp_path / "late.json", {}, minutes=-1)
    assert late.step("any", lambda: 5) is None
    assert not late.failed and late.body["steps"]["any"] == "skipped: out of time"


def test_without_a_gpu_it_says_how_to_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", str(tmp_path / "r.json")])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(Exception, match="no GPU was found; --dry-run checks this script"):
        bench.main()
