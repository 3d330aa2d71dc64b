"""What `import ddtree_trt` offers, and what it says where the native module is not beside the sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ddtree_trt
from ddtree_trt.errors import install_with

ROOT = Path(__file__).resolve().parents[2]


def test_the_public_names_are_listed() -> None:
    names = dir(ddtree_trt)
    assert {"LLM", "AsyncLLM", "SamplingParams", "RequestOutput", "__version__"} <= {*names} == {*ddtree_trt.__all__}
    assert all(getattr(ddtree_trt, name) is not None for name in names)


def test_sources_without_the_native_module_say_what_to_do(tmp_path: Path) -> None:
    """As in a checkout whose installation is a copy elsewhere: Python meets the sources in the working directory."""
    (tmp_path / "ddtree_trt").mkdir()
    for name in ("__init__.py", "errors.py"):
        (tmp_path / "ddtree_trt" / name).write_text((ROOT / "ddtree_trt" / name).read_text())
    command = [sys.executable, "-S", "-c", "from ddtree_trt import _native"]  # -S: no installation either
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ddtree_trt.errors.MissingDependency: {tmp_path}/ddtree_trt has no native module (_native); {install_with()}"
    )
