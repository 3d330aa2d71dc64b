"""The real TensorRT Python bindings on a machine that cannot have TensorRT: the published wheel over stub libraries.

Enums, exceptions, base classes and signatures are the shipping ones; whatever would reach the library is null. The
wheel is fetched once into build/tensorrt-bindings; without a network the tests that need it are skipped with the
reason.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "tensorrt-bindings"
PACKAGES = (
    "tensorrt_cu13_bindings==11.4.0.106",
    "cuda-bindings==13.0.3",
    "cuda-pathfinder==1.9.0",
    "pybind11-stubgen==2.5.5",
)
ONE_PROCESS = FileLock(FOLDER / ".lock")  # of those that run tests fills the folder, the others wait
_STUBS = {
    "libnvinfer.so.11": (
        "createInferBuilder_INTERNAL createInferRefitter_INTERNAL createInferRuntime_INTERNAL "
        "getBuilderPluginRegistry getPluginRegistry"
    ),
    "libnvinfer_plugin.so.11": "initLibNvInferPlugins",
    "libnvonnxparser.so.11": "createNvOnnxParser_INTERNAL createNvOnnxParserRefitter_INTERNAL getNvOnnxParserVersion",
}


@cache
@ONE_PROCESS
def _site() -> Path | str:
    """The folder with the packages, or why there is none."""
    site = FOLDER / f"python{sys.version_info.major}.{sys.version_info.minor}"
    complete = site / ".complete"
    if complete.is_file() and complete.read_text() == " ".join(PACKAGES):
        return site
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--upgrade"]
    try:
        run = subprocess.run(
            [*command, "--target", str(site), *PACKAGES], capture_output=True, text=True, timeout=500, check=False
        )
    except subprocess.TimeoutExpired:
        return "the TensorRT bindings could not be fetched in 100 s"
    if run.returncode:
        return f"the TensorRT bindings cannot be fetched: {run.stderr.strip().splitlines()[-1][:200]}"
    complete.write_text(" ".join(PACKAGES))
    return site


def site() -> Path:
    """The folder with the bindings, CUDA's and the stub generator. Skips the test where it cannot be had."""
    found = _site()
    if isinstance(found, str):
        pytest.skip(f"skipped: {found}")
    return found


@cache
@ONE_PROCESS
def _compile_stubs() -> None:
    """Libraries with the names and symbols the bindings are linked against; all functions return null."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("skipped: no C compiler for the stub libraries")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, symbols in _STUBS.items():
        source, library = FOLDER / f"{name}.c", FOLDER / name
        source.write_text("".join(f"void *{symbol}(void) {{ return 0; }}\n" for symbol in symbols.split()))
        if not library.is_file():
            partial = FOLDER / f"{name}.{os.getpid()}"
            command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", str(source), "-o", str(partial)]
            subprocess.run(command, check=True, capture_output=True)
            partial.replace(library)


@cache
def real_tensorrt() -> ModuleType:
    """The real bindings. Skips the test where they cannot be had.

    TensorRT itself where it is installed: stub libraries would take the place of its own in this process.
    """
    if importlib.util.find_spec("tensorrt") is not None:
        return importlib.import_module("tensorrt")
    folder = site()
    _compile_stubs()
    for name in _STUBS:
        ctypes.CDLL(str(FOLDER / name), ctypes.RTLD_GLOBAL)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("tensorrt_bindings")
    finally:
        sys.path.remove(str(folder))


@cache
def cuda_names() -> frozenset[str]:
    """What the real `cuda.bindings.runtime` has. In a process of its own: it must not look installed in this one."""
    code = "from cuda.bindings import runtime; print(*dir(runtime))"
    environment = {**os.environ, "PYTHONPATH": str(site())}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return frozenset(run.stdout.split())


@cache
@ONE_PROCESS
def type_stubs() -> Path:
    """A folder with `tensorrt` as type stubs for mypy, made from the real bindings."""
    site()
    _compile_stubs()
    folder = FOLDER / "stubs"
    package, made = folder / "tensorrt", folder / "tensorrt_bindings" / "tensorrt.pyi"
    if not package.is_dir():
        paths = [str(FOLDER / name) for name in _STUBS]
        script = (
            f"import ctypes; [ctypes.CDLL(path, ctypes.RTLD_GLOBAL) for path in {paths}]; import pybind11_stubgen as s;"
            f"s.main(['tensorrt_bindings.tensorrt', '-o', {str(folder)!r}, '--ignore-all-errors'])"
        )
        environment = {**os.environ, "PYTHONPATH": str(site())}
        subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, timeout=500)
        text = made.read_text()
        for pattern, replacement in _REPAIRS:
            text = re.sub(pattern, replacement, text)
        made.write_text(text)
        package.mkdir()
        (package / "__init__.pyi").write_text("from tensorrt_bindings.tensorrt import *\n\n__version__: str\n")
    return folder


# What the generator writes that is no Python, and what it cannot know: implicit conversions, the buffer protocol.
_REPAIRS = (
    (r"\b(in|lambda): ", r"\1_: "),
    (r"channel_axis: typing.SupportsInt\)", "channel_axis: int = ...)"),
    (r"typing\.SupportsInt", "int"),
    (r"(\w+: )Dims\b(?! \|)", r"\1Dims | collections.abc.Sequence[int]"),
    (r"(class IHostMemory:\n)", r"\1    def __buffer__(self, flags: int) -> memoryview: ...\n"),
)


# Calls against the signatures that pybind11 writes into docstrings


class WrongCall(AssertionError):
    """A call the shipping API does not have."""


def signatures(function: Any) -> list[list[tuple[str, str, bool]]]:
    """Per overload, (name, type, optional) of its parameters without self."""
    found = []
    for line in (function.__doc__ or "").splitlines():
        match = re.match(r"(?:\d+\. )?\w+\((.*)\) -> ", line)
        if match and "*args" not in match[1]:
            parts = [part for part in _split(match[1]) if part and not part.startswith("self")]
            found.append([_parameter(part) for part in parts])
    return found


def _split(text: str) -> list[str]:
    """At the commas outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _parameter(text: str) -> tuple[str, str, bool]:
    name, _, rest = text.partition(":")
    kind, _, default = rest.partition(" = ")
    return name.strip(), kind.strip(), default != ""


def check_call(function: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> None:
    """Raises WrongCall when no overload of a pybind11 function takes these arguments."""
    overloads = signatures(function)
    assert overloads, f"{function} has no signature"
    if not any(_fits(parameters, arguments, keywords) for parameters in overloads):
        raise WrongCall(f"{function.__name__} does not take {arguments} {keywords}: {overloads}")


def _fits(parameters: list[tuple[str, str, bool]], arguments: Sequence[Any], keywords: dict[str, Any]) -> bool:
    names = [name for name, _, _ in parameters]
    if len(arguments) > len(parameters) or not set(keywords) <= set(names[len(arguments) :]):
        return False
    given = {**dict(zip(names, arguments, strict=False)), **keywords}
    return all(_is(given[name], kind) if name in given else optional for name, kind, optional in parameters)


def _is(value: Any, kind: str) -> bool:
    kind = re.split("[.:]", kind)[-1]
    if kind == "str":
        return isinstance(value, str)
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "SupportsInt":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "Buffer":
        memoryview(value)
        return True
    if kind == "Dims":
        return isinstance(value, (tuple, list)) and all(type(size) is int for size in value)
    return kind in {cls.__name__ for cls in type(value).__mro__} or getattr(value, "spec_name", None) == kind
