"""The real Python bindings on a machine without a GPU: those of TensorRT for RTX, whose interface is TensorRT's."""

import importlib
import importlib.util
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest


@cache
def real_tensorrt() -> Any:
    """The module of TensorRT where it is installed, else of TensorRT for RTX. Skips the test without either."""
    if importlib.util.find_spec("tensorrt") is not None:
        return importlib.import_module("tensorrt")
    return pytest.importorskip("tensorrt_rtx_bindings", reason="needs TensorRT for RTX, of the extra `test`")


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
