"""What CUDA and NVIDIA's packages say, as both halves of the project ask them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ddtree_trt.device.libraries import (
    call,
    cuda_bindings,
    cuda_versions,
    current_gpu,
    import_package,
    import_tensorrt,
    version_text,
)
from ddtree_trt.errors import EngineError, MissingDependency

SUCCESS, BROKEN = SimpleNamespace(name="cudaSuccess"), SimpleNamespace(name="cudaErrorNoDevice")


def api(**functions: Any) -> Any:
    """A CUDA runtime of a known machine; `functions` takes the place of its own."""
    known = {
        "cudaError_t": SimpleNamespace(cudaSuccess=SUCCESS),
        "cudaGetErrorString": lambda status: (SUCCESS, b"no CUDA-capable device is detected"),
        "cudaGetDeviceCount": lambda: (SUCCESS, 1),
        "cudaGetDevice": lambda: (SUCCESS, 0),
        "cudaGetDeviceProperties": lambda index: (SUCCESS, SimpleNamespace(name=b"H100\0\0", major=9, minor=0)),
        "cudaRuntimeGetVersion": lambda: (SUCCESS, 13010),
        "cudaDriverGetVersion": lambda: (SUCCESS, 12080),
    }
    return SimpleNamespace(**{**known, **functions})


def test_a_call_returns_what_is_beside_the_status() -> None:
    functions = {"none": lambda: (SUCCESS,), "one": lambda x: (SUCCESS, x), "two": lambda: (SUCCESS, 1, 2)}
    cuda = api(**functions)
    assert (call(cuda, "none"), call(cuda, "one", 7), call(cuda, "two")) == (None, 7, (1, 2))


@pytest.mark.parametrize("text", [b"no CUDA-capable device is detected", "no CUDA-capable device is detected"])
def test_a_refusal_names_function_status_and_reason(text: bytes | str) -> None:
    cuda = api(cudaGetDeviceCount=lambda: (BROKEN, None), cudaGetErrorString=lambda status: (SUCCESS, text))
    with pytest.raises(EngineError) as caught:
        current_gpu(cuda)
    assert str(caught.value) == "cudaGetDeviceCount failed with cudaErrorNoDevice: no CUDA-capable device is detected"


def test_the_current_gpu() -> None:
    gpu = current_gpu(api())
    assert gpu is not None
    assert (gpu.name, gpu.major, gpu.minor, gpu.sm) == ("H100", 9, 0, 90)
    assert current_gpu(api(cudaGetDeviceCount=lambda: (SUCCESS, 0))) is None


def test_versions_as_they_are_written() -> None:
    versions = cuda_versions(api())
    assert (versions.runtime, versions.driver) == ("13.1", "12.8")
    assert version_text(13000) == "13.0"


def test_packages_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(MissingDependency, match=r"^the tensorrt backend cannot import cuda\.bindings\.runtime \(.*pip"):
        cuda_bindings()
    with pytest.raises(MissingDependency, match=r"^the tensorrt backend cannot import tensorrt \(.*pip install"):
        import_tensorrt()
    with pytest.raises(MissingDependency, match=r"^it was built with another \(.*pip install"):
        import_tensorrt("it was built with another")


def test_a_package_without_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise OSError("libnvinfer.so.11: cannot open shared object file\nand more")

    monkeypatch.setattr("ddtree_trt.device.libraries.importlib.import_module", broken)
    with pytest.raises(MissingDependency) as caught:
        import_package("tensorrt")
    assert "(libnvinfer.so.11: cannot open shared object file)" in str(caught.value)
    assert "\n" not in str(caught.value)
