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


REFUSALS = """
import sys, torch
torch.ops.load_library(sys.argv[1])
ops = torch.ops.ddtree
parents = torch.tensor([[-1, 0, 0]], dtype=torch.int32)
mask = torch.zeros(1, 3, 1, dtype=torch.int32)
cache = torch.zeros(2, 1, 2, 8, 64, dtype=torch.bfloat16)
one, keep = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32)
q, kv = torch.zeros(1, 3, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 3, 2, 64, dtype=torch.bfloat16)
space = torch.zeros(1 << 20, dtype=torch.uint8)

def attend(q=q, k=kv, v=kv, cache_k=cache[0], mask=mask, out=q, space=space, mode=0):
    ops.tree_attention(q, k, v, cache_k, cache[1], one, one, mask, mode, 0.125, out, space, 2)

ops.packed_mask(parents, mask)
ops.compact(cache, one, one, keep, one)
attend()
for call, text in [
    (lambda: ops.packed_mask(parents.long(), mask), "parents must be"),
    (lambda: ops.packed_mask(parents, mask[:, :2].contiguous()), "mask must have shape"),
    (lambda: ops.packed_mask(parents, torch.zeros(1, 3, 0, dtype=torch.int32)), "status 2"),
    (lambda: ops.compact(cache.transpose(3, 4), one, one, keep, one), "contiguous"),
    (lambda: ops.compact(cache, one.long(), one, keep, one), "slot_ids must be"),
    (lambda: attend(q=q.float()), "q must be bfloat16 or float16"),
    (lambda: attend(k=kv[:, :2]), "k must"),
    (lambda: attend(v=kv.half()), "v must be"),
    (lambda: attend(mask=None), "status 2"),
    (lambda: attend(space=space[:64]), "status 5"),
    (lambda: attend(mode=7), "status 3"),
    (lambda: attend(out=q[:, :, :2]), "out must"),
]:
    try:
        call()
    except RuntimeError as error:
        assert text in str(error), (text, str(error))
    else:
        raise AssertionError(f"not refused: {text}")
print("refused all")
"""


def test_operators_refuse_wrong_tensors() -> None:
    run = subprocess.run([sys.executable, "-c", REFUSALS, str(torch_operators())], capture_output=True, text=True)
    assert run.returncode == 0 and "refused all" in run.stdout, run.stdout + run.stderr
