"""Lossless tree-based speculative decoding: build engines, run them, serve them.

`LLM`, `AsyncLLM`, `SamplingParams`, `StructuredOutput` and the output records are loaded on first use, so that
importing the package costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own would have to be imported
if TYPE_CHECKING:
    from typing import Any

    from ddtree_trt.runtime.async_llm import AsyncLLM as AsyncLLM
    from ddtree_trt.runtime.llm import LLM as LLM
    from ddtree_trt.runtime.outputs import CompletionOutput as CompletionOutput
    from ddtree_trt.runtime.outputs import RequestOutput as RequestOutput
    from ddtree_trt.runtime.params import SamplingParams as SamplingParams
    from ddtree_trt.runtime.structured.record import StructuredOutput as StructuredOutput

__version__ = "0.1.0"

_MODULES = {  # name → its module in `runtime`
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "SamplingParams": "params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "StructuredOutput": "structured.record",
}
__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutput", "__version__"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return getattr(import_module(f"ddtree_trt.runtime.{_MODULES[name]}"), name)
    if name != "_native":
        raise AttributeError(f"module 'ddtree_trt' has no attribute {name!r}")
    from hashlib import sha256
    from pathlib import Path

    from ddtree_trt.errors import MissingDependency, install_with

    try:
        native = import_module("ddtree_trt._native")
    except ModuleNotFoundError:  # a checkout that was not installed, or whose installation is a copy elsewhere
        raise MissingDependency(f"{__path__[0]} has no native module (_native); {install_with()}") from None
    if getattr(native, "STUB", "") != sha256(Path(__file__).with_name("_native.pyi").read_bytes()).hexdigest():
        raise MissingDependency(f"{native.__file__} was built for another state of this package; {install_with()}")
    return native


def __dir__() -> list[str]:
    return [*__all__]
