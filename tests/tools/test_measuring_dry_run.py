"""tools/gpu_bench.sh, the one script for a GPU machine, run dry: on the CPU, with tiny shapes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from ddtree_trt.runtime.stats import ROUND_STAGES

ROOT = Path(__file__).resolve().parents[2]


def test_dry_run(tmp_path: Path) -> None:
    command = [str(ROOT / "tools" / "gpu_bench.sh"), "--dry-run", str(tmp_path)]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads((tmp_path / "gpu_bench.json").read_text())
    skipped = result["steps"].pop("two GPUs")
    assert skipped.startswith("skipped") and all(outcome.startswith("ok") for outcome in result["steps"].values())
    assert result["correctness"]["fp32"]["outputs"] == 7
    assert result["correctness"]["fp32"]["relative_error"] < 2e-3
    (pair,) = result["pairs"]
    # Two bytes for each of 6 layers' keys and values of 2 heads of 16.
    assert pair["kv_bytes_per_token"] == 2 * 6 * 2 * 2 * 16
    assert [run["past"] for run in pair["runs"]] == [16, 40]
    for run in pair["runs"]:
        assert run["ar"]["tokens_per_round"] == 1
        assert [row["budget"] for row in run["ddtree"]] == [3, 15]
        for timed in (run["ar"], run["dflash"], *(row["host"] for row in run["ddtree"])):
            assert 0 < timed["round_ms"]["low"] <= timed["round_ms"]["median"] <= timed["round_ms"]["high"]
            assert set(timed["stage_ms"]) == set(ROUND_STAGES)
        for row in run["ddtree"]:
            assert 1 <= row["device"]["tokens_per_round"] <= 1 + row["budget"] and row["device"]["round_ms"] > 0
    (batch,) = result["batches"]
    assert {(row["slots"], row["tokens"]) for row in batch["rounds"]} == {(n, 1 << i) for n in (1, 2) for i in range(7)}
    assert min(result["tokens_per_second"].values()) > 0 and len(result["targets"]) == 6 + 2 + 1
