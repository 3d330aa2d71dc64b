"""Builds what the plugin tests load: the kernels' own source on the CPU, and the TensorRT glue where headers are found.

No nvcc runs here. Everything lands in build/plugins-test, so that only the first run pays.

Environment: DDTREE_TRT_INCLUDE_DIR names the TensorRT headers (default build/tensorrt/include), DDTREE_LEAN_PYTHON an
interpreter with the lean runtime (default this one), DDTREE_TEST_TORCH=1 builds the torch operators too.
"""

import ctypes
import ctypes.util
import importlib.util
import mmap
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from kernel_library import KernelLibrary
from pacing import WAIT_S

ROOT = Path(__file__).parents[3]
BUILD = ROOT / "build" / "plugins-test"


@cache
def _build(name: str, *options: str) -> str | None:
    """None when it worked, else what was missing or the end of the compiler's words."""
    folder = BUILD / name
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            return f"no {tool}"
    options = ("-DDDTREE_HOST=OFF", "-DDDTREE_EMULATOR=ON", *options)
    configure = ["cmake", "-S", str(ROOT / "cpp_plugins"), "-B", str(folder), *options]
    with FileLock(f"{folder}.lock"):
        for command in (configure, ["cmake", "--build", str(folder)]):
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                return f"{' '.join(command)}\n{(run.stdout + run.stderr)[-4000:]}"
    return None


def _built(name: str, *options: str) -> Path:
    problem = _build(name, *options)
    if problem is not None and (problem.startswith("no ") or "CUDAToolkit" in problem):
        pytest.skip(f"skipped: {problem}")
    assert problem is None, problem
    return BUILD / name


@cache
def emulated_kernels() -> KernelLibrary:
    """The kernels on the CPU: arrays are NumPy's, streams are None."""
    return KernelLibrary(_built("kernels") / "libddtree_emulated.so")


def glue() -> Path:
    """Folder of the glue test program and of the plugin library on emulated kernels."""
    headers = Path(os.environ.get("DDTREE_TRT_INCLUDE_DIR") or ROOT / "build" / "tensorrt" / "include")
    if not (headers / "NvInferRuntime.h").is_file():
        pytest.skip("skipped: no TensorRT headers (cpp_plugins/README.md says how to have them)")
    return _built("glue", f"-DDDTREE_TRT_INCLUDE_DIR={headers}")


def torch_operators() -> Path:
    """The torch operators on emulated kernels."""
    if os.environ.get("DDTREE_TEST_TORCH") != "1":
        pytest.skip("skipped: compiling against torch takes long; `make plugins-test` asks for it")
    options = ("-DDDTREE_TORCH=ON", f"-DPython_EXECUTABLE={sys.executable}")
    return _built("torch", *options) / "libddtree_emulated_torch.so"


def lean_python() -> str:
    """An interpreter that has the lean TensorRT bindings."""
    given = os.environ.get("DDTREE_LEAN_PYTHON")
    if given is None and importlib.util.find_spec("tensorrt_lean_bindings") is None:
        pytest.skip("skipped: no lean TensorRT runtime (cpp_plugins/README.md says how to have it)")
    return given or sys.executable


def aligned(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """An uninitialised array at a multiple of 16 bytes, as the launchers ask."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(count + 16, np.uint8)
    start = -raw.ctypes.data % 16
    return raw[start : start + count].view(dtype).reshape(shape)


def check_in_child(work: Callable[..., None], *given: object) -> None:
    """Run `work` in a process of its own: an access outside an array ends it by a signal."""
    child = multiprocessing.get_context("fork").Process(target=work, args=given)
    child.start()
    child.join(WAIT_S)
    assert child.exitcode == 0, "a signal here (negative) is an access outside an array"


_libc = ctypes.CDLL(ctypes.util.find_library("c"))


class Guarded:
    """Copies of arrays that touch a page nobody may read or write, at their end or at their beginning."""

    def __init__(self, at_end: bool) -> None:
        self._at_end = at_end
        self._maps: list[mmap.mmap] = []

    def __call__(self, array: np.ndarray) -> np.ndarray:
        page = mmap.PAGESIZE
        inner = max(-(-array.nbytes // page), 1) * page
        memory = mmap.mmap(-1, inner + 2 * page)
        self._maps.append(memory)
        whole = np.frombuffer(memory, np.uint8)
        for edge in (0, page + inner):
            assert _libc.mprotect(ctypes.c_void_p(whole.ctypes.data + edge), ctypes.c_size_t(page), 0) == 0
        start = page + (inner - array.nbytes if self._at_end else 0)
        copy = whole[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy
