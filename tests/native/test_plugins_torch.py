"""The torch operators on emulated kernels, through the script that checks them on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from plugin_libraries import BUILD, ROOT, torch_operators


def test_the_gpu_check_passes_on_emulated_kernels(tmp_path: Path) -> None:
    operators = torch_operators()
    host = BUILD / "libhost_tree.so"
    sources = [
        str(ROOT / "cpp_plugins" / name) for name in ("tests/host_tree.cpp", "host/candidates.cpp", "host/tree.cpp")
    ]
    include = str(ROOT / "cpp_plugins" / "include")
    compiler = ["c++", "-std=c++17", "-O2", "-fPIC", "-shared", f"-I{include}", *sources, "-o", str(host)]
    subprocess.run(compiler, check=True, capture_output=True)
    result = tmp_path / "check.json"
    command = [
        sys.executable,
        "-m",
        "tools.gpu.kernel_check",
        str(operators),
        str(host),
        str(result),
        "--device",
        "cpu",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(result.read_text())
    assert set(report) == {"trees", "compaction", "attention"} and all(part["ok"] for part in report.values())
