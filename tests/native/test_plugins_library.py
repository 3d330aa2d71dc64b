"""Native libraries: finding and refusing them, that Python and C++ name the same things, the plugins as TensorRT meets
them, and the torch operators through the script that checks them on a GPU. Neither a GPU nor the builder is needed.

TensorRT's registry is that of the lean runtime, in a process of its own: its objects need not survive an interpreter's
end.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from plugin_libraries import BUILD, ROOT, emulated_kernels, glue, lean_python, torch_operators

from ddtree_trt import plugins
from ddtree_trt.errors import MissingDependency
from ddtree_trt.plugins import library

SOURCES = ROOT / "cpp_plugins"


def test_a_missing_library_names_the_command_that_builds_it(tmp_path: Path) -> None:
    for name in library.NAMES:
        with pytest.raises(MissingDependency, match=f"{name} is not built.*make plugins"):
            library.find(name, tmp_path)


def test_a_stale_library_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / library.PLUGINS).write_bytes(b"\x7fELF no marker")
    with pytest.raises(MissingDependency, match=rf"ABI None, this version needs {plugins.ABI}.*make plugins"):
        library.find(library.PLUGINS, tmp_path)
    (tmp_path / library.PLUGINS).write_bytes(b"\x7fELF ddtree-plugin-abi=7; and so on")
    with pytest.raises(MissingDependency, match=rf"ABI 7, this version needs {plugins.ABI}.*make plugins"):
        library.find(library.PLUGINS, tmp_path)


def test_libraries_of_a_wheel_come_behind_those_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_every_kernel_waits_and_then_lets_the_next_begin() -> None:
    """First of all: a kernel that returns before it waits is done before those that it depends on."""
    for source in (SOURCES / "kernels").glob("*.cu*"):
        text = source.read_text()
        assert "<<<" not in text and ("cudaLaunch" not in text or source.name == "primitives.cuh")
        bodies = re.findall(r"\n__global__ [^{;]*\{\s*([^\n]*)", text)
        assert len(bodies) == text.count("__global__ ")
        assert all(first == "device::wait_and_trigger();" for first in bodies), source


# Blocks of attention that the launcher expects on a multiprocessor at a time, by their threads.
_ATTENTION_BLOCKS = {32: 3, 128: 2}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_machine_code_of_every_kernel(arch: str, tmp_path: Path) -> None:
    """What the emulation cannot see: spills, arrays that are no registers, blocks that do not fit beside each other,
    loads of few bytes, and from Hopper on the wait of every kernel, before it reads, and the trigger behind it."""
    nvcc = shutil.which("nvcc")
    if nvcc is None or os.environ.get("DDTREE_TEST_TORCH") != "1":
        pytest.skip("skipped: it runs nvcc over every kernel, where there is one; `make plugins-test` asks for it")
    command = [nvcc, "-std=c++17", "-O3", f"-arch={arch}", "-Xptxas", "-v", f"-I{SOURCES}/include", "-cubin"]
    for source in sorted((SOURCES / "kernels").glob("*.cu")):
        cubin = tmp_path / f"{source.stem}.cubin"
        run = subprocess.run([*command, str(source), "-o", str(cubin)], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", run.stderr)
        assert frames and set(frames) == {("0", "0", "0")}, run.stderr
        used = re.findall(r"attendI\w*?Li(64|128)ELi(1|4)E[^\n]*\n[^U]*Used (\d+) registers", run.stderr)
        assert len(used) == (8 if source.stem == "tree_attention" else 0)
        for head_dim, warps, registers in used:
            threads = 32 * int(warps)
            assert int(registers) * threads * _ATTENTION_BLOCKS[threads] <= 65536, (head_dim, warps, registers)
        for name, code in machine_code(cubin).items():
            if arch == "sm_90":
                first = [code.find(word) for word in ("ACQBULK", "PREEXIT", "LDG")]
                assert 0 <= first[0] < first[1] and (first[2] < 0 or first[0] < first[2]), name
            if "attend" in name or ("combine" in name and "Li128" in name):
                assert ("LDGSTS.E.BYPASS.128" if "attend" in name else "LDG.E.128") in code, name


def machine_code(cubin: Path) -> dict[str, str]:
    """SASS of each kernel; nothing where there is no cuobjdump (the toolkit's, or nvidia-cuda-cuobjdump and
    nvidia-cuda-nvdisasm of PyPI)."""
    wheel = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"
    path = os.pathsep.join((str(wheel), os.environ["PATH"]))
    if (tool := shutil.which("cuobjdump", path=path)) is None:
        return {}
    run = subprocess.run([tool, "-sass", str(cubin)], capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert run.returncode == 0, run.stderr
    _, *parts = re.split(r"Function : (\S+)", run.stdout)
    return dict(zip(parts[::2], parts[1::2], strict=True))


# Libraries as they are loaded: on emulated kernels, and the built ones


def built(name: str) -> Path:
    path = library.FOLDER / name
    if not path.is_file():
        pytest.skip(f"skipped: {name} is not built (`make plugins`)")
    return path


@pytest.fixture(params=["emulated", "built"])
def plugin_library(request: pytest.FixtureRequest) -> Path:
    if request.param == "emulated":
        return glue() / "libddtree_emulated_plugins.so"
    return built(library.PLUGINS)


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


def test_the_lean_registry_finds_and_creates_the_plugins(plugin_library: Path) -> None:
    command = [lean_python(), str(SOURCES / "tests" / "lean_registry.py"), str(plugin_library)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    ours = [creator for creator in found["creators"] if creator[2] == plugins.NAMESPACE]
    assert ours == [[name, plugins.VERSION, plugins.NAMESPACE] for name in plugins.NAMES]
    assert found["attributes"] == {plugins.ATTENTION: list(plugins.ATTENTION_ATTRIBUTES), plugins.COMPACT: []}
    assert found["created"] == [True] * 4
    assert found["refused"] and all(found["refused"].values()), found["refused"]
    assert not found["elsewhere"], "a creator must not be found under another version or namespace"


def test_the_gpu_check_passes_on_emulated_kernels(tmp_path: Path) -> None:
    operators = torch_operators()
    host = BUILD / "libhost_tree.so"
    sources = [str(SOURCES / name) for name in ("tests/host_tree.cpp", "host/candidates.cpp", "host/tree.cpp")]
    compiler = ["c++", "-std=c++17", "-O2", "-fPIC", "-shared", f"-I{SOURCES}/include", *sources, "-o", str(host)]
    subprocess.run(compiler, check=True, capture_output=True)
    result = tmp_path / "check.json"
    script = [sys.executable, "-m", "tools.gpu.kernel_check"]
    command = [*script, str(operators), str(host), str(result), "--device", "cpu"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(result.read_text())
    assert len(report) == 8 and all(part["ok"] for part in report.values())
