"""The plugin library as TensorRT meets it, without a GPU and without the builder.

The glue runs on the emulated kernels; the registry is that of the lean runtime, in a process of its own because
TensorRT's objects need not survive an interpreter's end.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from plugin_libraries import glue, lean_python

from ddtree_trt import plugins
from ddtree_trt.plugins import library

REGISTRY = Path(__file__).parents[2] / "cpp_plugins" / "tests" / "lean_registry.py"


@pytest.fixture(params=["emulated", "built"])
def plugin_library(request: pytest.FixtureRequest) -> Path:
    if request.param == "emulated":
        return glue() / "libddtree_emulated_plugins.so"
    path = library.FOLDER / library.PLUGINS
    if not path.is_file():
        pytest.skip(f"skipped: {library.PLUGINS} is not built (`make plugins`)")
    return path


@pytest.mark.parametrize("program", ["ddtree_glue_test", "ddtree_glue_workspace_test"])
def test_glue_without_tensorrt(program: str) -> None:
    run = subprocess.run([str(glue() / program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 failed" in run.stdout


def nm(path: Path, *flags: str) -> list[str]:
    run = subprocess.run(["nm", "-D", *flags, str(path)], capture_output=True, text=True, check=True)
    return [line.split()[-1].split("@")[0] for line in run.stdout.splitlines()]


def test_exactly_two_symbols_and_nothing_of_tensorrt(plugin_library: Path) -> None:
    assert sorted(nm(plugin_library, "--defined-only")) == ["getCreators", "setLoggerFinder"]
    undefined = nm(plugin_library, "--undefined-only")
    assert undefined
    assert not [name for name in undefined if "nvinfer" in name or "Infer" in name or name.startswith("cuda")]


def test_the_library_carries_its_abi(plugin_library: Path) -> None:
    assert library.abi_of(plugin_library) == plugins.ABI


def test_the_lean_registry_finds_and_creates_the_plugins(plugin_library: Path) -> None:
    run = subprocess.run(
        [lean_python(), str(REGISTRY), str(plugin_library)], capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    ours = [creator for creator in found["creators"] if creator[2] == plugins.NAMESPACE]
    assert ours == [[name, plugins.VERSION, plugins.NAMESPACE] for name in plugins.NAMES]
    assert found["attributes"] == {plugins.ATTENTION: list(plugins.ATTENTION_ATTRIBUTES), plugins.COMPACT: []}
    assert found["created"] == [True] * 4
    assert found["refused"] and all(found["refused"].values()), found["refused"]
    assert not found["elsewhere"], "a creator must not be found under another version or namespace"
