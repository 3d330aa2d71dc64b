"""The wheel of the GPU libraries, made by its script from the source distribution and installed beside the package.

It needs nvcc, the headers of TensorRT and a CUDA build of torch, but no GPU: DDTREE_WHEEL_PYTHON names the interpreter
of the environment that docs/releasing.md makes.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ddtree_trt.plugins import library

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.package
PYTHON = "DDTREE_WHEEL_PYTHON"
SECONDS = 1800  # a guard against hangs alone

FOUND = """\
from ddtree_trt.plugins import library
for name in library.NAMES:
    print(library.find(name))
"""


@pytest.fixture(scope="module")
def wheel(distributions: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = os.environ.get(PYTHON)
    if python is None:
        pytest.skip(f"{PYTHON} does not name the interpreter of an environment as docs/releasing.md makes it")
    out = tmp_path_factory.mktemp("gpu")
    with tarfile.open(distributions.source) as archive:
        archive.extractall(out, filter="data")
    (source,) = out.iterdir()
    headers = os.environ.get("DDTREE_TRT_INCLUDE_DIR") or str(ROOT / "build" / "tensorrt" / "include")
    programs = f"{Path(python).absolute().parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHON": python, "PATH": programs, "DDTREE_TRT_INCLUDE_DIR": headers}
    script = source / "cpp_plugins" / "wheel" / "build.sh"
    built = subprocess.run([str(script)], cwd=out, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = (source / "dist").glob("*.whl")
    return found


def test_it_has_the_libraries_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        names = {name for name in archive.namelist() if not name.endswith("/") and ".dist-info/" not in name}
    assert names == {f"{library.WHEEL}/{name}" for name in (*library.NAMES, "__init__.py", "LICENSE")}
    assert wheel.name.startswith(f"{library.WHEEL}-") and "-py3-none-manylinux_" in wheel.name


def test_the_package_finds_its_libraries_until_it_is_removed(
    distributions: Any, wheel: Path, empty: Any, tmp_path: Path
) -> None:
    def call(*words: object) -> Any:
        return empty.run("python", *words, cwd=tmp_path)

    empty.install("--no-deps", "--no-index", distributions.wheel, wheel)
    found = call("-c", FOUND)
    assert found.returncode == 0, found.stderr
    paths = found.stdout.split()
    assert [Path(path).name for path in paths] == list(library.NAMES)
    assert all(Path(path).parent.name == library.WHEEL for path in paths)
    assert all(Path(path).is_relative_to(empty.directory) for path in paths)
    assert call("-m", "pip", "uninstall", "--yes", "--quiet", "ddtree-trt-cuda13").returncode == 0
    missing = call("-c", FOUND)
    assert "MissingDependency: native library libddtree_plugins.so is not built" in missing.stderr
