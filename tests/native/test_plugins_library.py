"""Finding and refusing native libraries, and that Python and C++ name the same things."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest
from plugin_libraries import ROOT, emulated_kernels

from ddtree_trt import plugins
from ddtree_trt.errors import MissingDependency
from ddtree_trt.plugins import library, operators

SOURCES = ROOT / "cpp_plugins"


def built(name: str) -> Path:
    path = library.FOLDER / name
    if not path.is_file():
        pytest.skip(f"skipped: {name} is not built (`make plugins`)")
    return path


def test_a_missing_library_names_the_command_that_builds_it(tmp_path: Path) -> None:
    for name in library.NAMES:
        with pytest.raises(MissingDependency, match=f"{name} is not built.*make plugins"):
            library.find(name, tmp_path)


def test_a_stale_library_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / library.PLUGINS).write_bytes(b"\x7fELF no marker")
    with pytest.raises(MissingDependency, match=r"ABI None, this version needs 3.*make plugins"):
        library.find(library.PLUGINS, tmp_path)
    (tmp_path / library.PLUGINS).write_bytes(b"\x7fELF ddtree-plugin-abi=7; and so on")
    with pytest.raises(MissingDependency, match=r"ABI 7, this version needs 3.*make plugins"):
        library.find(library.PLUGINS, tmp_path)


def test_libraries_of_a_wheel_are_found_behind_those_of_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, wheel = tmp_path / "own", tmp_path / "site" / library.WHEEL
    for folder in (own, wheel):
        folder.mkdir(parents=True)
    monkeypatch.setattr(library, "FOLDER", own)
    assert library.library_path(library.TORCH) == own / library.TORCH
    (wheel / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(MissingDependency, match=f"not built: expected it at {own / library.TORCH}"):
        library.find(library.TORCH)
    (wheel / library.TORCH).write_bytes(b"ddtree-plugin-abi=%d;" % plugins.ABI)
    assert library.find(library.TORCH) == wheel / library.TORCH
    assert library.WHEEL not in sys.modules, "a library is found without running the package"
    (own / library.TORCH).write_bytes(b"ddtree-plugin-abi=1;")
    with pytest.raises(MissingDependency, match="has plugin ABI 1"):
        library.find(library.TORCH)


def test_the_abi_is_one_number(tmp_path: Path) -> None:
    header = (SOURCES / "include" / "ddtree" / "abi.h").read_text()
    assert search(r"#define DDTREE_ABI (\d+)", header) == str(plugins.ABI)
    kernels = emulated_kernels()
    assert kernels.abi == library.abi_of(kernels.path) == plugins.ABI
    copy = tmp_path / library.PLUGINS
    shutil.copy(kernels.path, copy)
    assert library.find(library.PLUGINS, tmp_path) == copy


def search(pattern: str, text: str) -> str:
    """The first group of the pattern's first match."""
    found = re.search(pattern, text, re.DOTALL)
    assert found is not None, pattern
    return found[1]


def enum_names(source: str, kind: str) -> list[str]:
    body = search(rf"enum {kind} {{([^}}]*)}}", (SOURCES / "trt" / source).read_text())
    return [name.strip() for name in body.split(",")]


def camel(name: str) -> str:
    return "k" + name.title().replace("_", "")


@pytest.mark.parametrize(
    ("header", "inputs", "outputs"),
    [
        ("attention_plugin.h", plugins.AttentionInput, plugins.AttentionOutput),
        ("compact_plugin.h", plugins.CompactInput, plugins.CompactOutput),
    ],
)
def test_tensor_positions_are_those_of_the_plugins(header: str, inputs: type[Enum], outputs: type[Enum]) -> None:
    assert [*(camel(m.name) for m in inputs), "kInputs"] == enum_names(header, "Input")
    assert [*(camel(m.name) for m in outputs), "kOutputs"] == enum_names(header, "Output")


def test_every_kernel_is_in_the_list_all_builds_read() -> None:
    kernels = SOURCES / "kernels"
    assert (kernels / "sources.txt").read_text().split() == sorted(path.name for path in kernels.glob("*.cu"))
    readers = ["CMakeLists.txt", "tests/gpu_build.sh"]
    assert all("kernels/sources.txt" in (SOURCES / reader).read_text() for reader in readers)


def test_torch_operators_are_those_listed() -> None:
    source = (SOURCES / "torch" / "ops.cpp").read_text()
    defined = re.findall(r"m\.def\(((?:\s*\"[^\"]*\")+)\);", source)
    assert tuple("".join(re.findall(r'"([^"]*)"', text)) for text in defined) == operators.SCHEMAS
    assert tuple(re.findall(r"m\.impl\(\"(\w+)\", (?:\1)\);", source)) == operators.OPERATORS


@pytest.mark.parametrize("name", library.NAMES)
def test_built_libraries_leak_no_symbols(name: str) -> None:
    path = built(name)
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[-1] for line in symbols.splitlines()}
    assert all(symbol.startswith("ddtree_") for symbol in names if symbol.startswith(("cuda", "ddtree")))
