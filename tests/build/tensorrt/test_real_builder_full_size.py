"""Published shapes with random weights through TensorRT's real builder, that of TensorRT for RTX: no GPU, much memory.

What the tool prints is where the figures in docs/benchmarks.md come from; `-rP` shows it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from real_builder import rtx
from sharing import free_bytes

pytestmark = [pytest.mark.rtx, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[3]
ALONE = FileLock(ROOT / "build" / ".native-plan.lock")  # of the processes that run tests, one builds such a plan


@pytest.mark.parametrize(
    ("arguments", "free_gb"),
    [
        ("qwen3-0.6b", 4),
        ("qwen3-1.7b", 12),
        # Every distinct layer: the first, the last, the head, ArgMax; the drafter's block and TopK.
        ("qwen3-4b --layers 2", 4),
        ("qwen3-4b --layers 2 --network drafter", 4),
        ("qwen3-8b --layers 2", 6),
        ("qwen3-8b --layers 2 --network drafter", 6),
    ],
)
def test_published_shape(arguments: str, free_gb: int, record_property: Callable[[str, object], None]) -> None:
    rtx()
    Path(ALONE.lock_file).parent.mkdir(exist_ok=True)
    with ALONE:
        if free_bytes() < free_gb << 30:
            pytest.skip(f"needs {free_gb} GB of free memory")
        command = [sys.executable, "-m", "workbench", "native-plan", *arguments.split()]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    print(run.stdout)
    record_property("plan_bytes", result["plan_bytes"])
    assert result["weight_bytes"] < result["plan_bytes"] < 1.1 * result["weight_bytes"] + (64 << 20)
