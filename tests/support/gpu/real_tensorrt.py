"""The real Python bindings on a machine without a GPU: those of TensorRT for RTX, whose interface is TensorRT's, and
those of CUDA, from a wheel that is fetched once into build/cuda-bindings.

Where the wheel cannot be fetched, the tests that need it are skipped with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "cuda-bindings"
PACKAGES = ("cuda-bindings==13.0.3", "cuda-pathfinder==1.9.0")
ONE_PROCESS = FileLock(FOLDER / ".lock")  # of those that run tests fills the folder, the others wait


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
        return "the CUDA bindings could not be fetched in 500 s"
    if run.returncode:
        return f"the CUDA bindings cannot be fetched: {run.stderr.strip().splitlines()[-1][:200]}"
    complete.write_text(" ".join(PACKAGES))
    return site


def site() -> Path:
    """The folder with CUDA's bindings. Skips the test where it cannot be had."""
    found = _site()
    if isinstance(found, str):
        pytest.skip(f"skipped: {found}")
    return found


@cache
def real_tensorrt() -> Any:
    """The module of TensorRT where it is installed, else of TensorRT for RTX. Skips the test without either."""
    if importlib.util.find_spec("tensorrt") is not None:
        return importlib.import_module("tensorrt")
    return pytest.importorskip("tensorrt_rtx_bindings", reason="needs TensorRT for RTX, of the extra `test`")


@cache
def cuda_names() -> frozenset[str]:
    """What the real `cuda.bindings.runtime` has. In a process of its own: it must not look installed in this one."""
    code = "from cuda.bindings import runtime; print(*dir(runtime))"
    environment = {**os.environ, "PYTHONPATH": str(site())}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return frozenset(run.stdout.split())


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
