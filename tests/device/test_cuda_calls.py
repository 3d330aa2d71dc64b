"""What CUDA and NVIDIA's packages say, as both halves of the project ask them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_cuda import FakeCuda, cudaError_t

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


@pytest.mark.parametrize(("found", "returned"), [((), None), ((7,), 7), ((1, 2), (1, 2))])
def test_a_call_returns_what_is_beside_the_status(found: tuple[int, ...], returned: Any) -> None:
    api = SimpleNamespace(cudaError_t=cudaError_t, function=lambda *given: (cudaError_t.cudaSuccess, *found))
    assert call(api, "function", 5) == returned


@pytest.mark.parametrize("text", [b"no CUDA-capable device is detected", "no CUDA-capable device is detected"])
def test_a_refusal_names_function_status_and_reason(text: bytes | str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.fail["cudaGetDeviceCount"] = cudaError_t.cudaErrorNoDevice
    monkeypatch.setattr(FakeCuda, "cudaGetErrorString", lambda self, status: text)
    with pytest.raises(EngineError) as caught:
        current_gpu(cuda)
    assert str(caught.value) == "cudaGetDeviceCount failed with cudaErrorNoDevice: no CUDA-capable device is detected"


def test_the_current_gpu_and_versions_as_they_are_written() -> None:
    cuda = FakeCuda(sm=90)
    cuda.name, cuda.runtime, cuda.driver = "H100\0\0", 13010, 12080
    gpu, versions = current_gpu(cuda), cuda_versions(cuda)
    assert gpu is not None
    assert (gpu.name, gpu.major, gpu.minor, gpu.sm) == ("H100", 9, 0, 90)
    assert (versions.runtime, versions.driver) == ("13.1", "12.8")
    assert version_text(13000) == "13.0"
    cuda.count = 0
    assert current_gpu(cuda) is None


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
