"""The engine of TensorRT for RTX on a pretended machine: what it refuses, and the kernels that it keeps."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_trt_engine import RTX, Lowerings, Machine, installed
from fake_trt_runtime import VERSION

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.errors import ArtifactError, DDTreeError, MissingDependency
from ddtree_trt.inspection import inspect_engine
from ddtree_trt.runtime.engines.load import open_engine


@pytest.fixture(scope="module")
def lowerings(small_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Lowerings:
    folder = tmp_path_factory.mktemp("lowered")
    return Lowerings.packaged(folder, small_engine, RTX, "fp16")


@pytest.fixture
def machine(lowerings: Lowerings) -> Iterator[Machine]:
    with installed(lowerings.machine()) as machine:
        yield machine


# What it refuses


def refused(machine: Machine, kind: type[DDTreeError], *words: str) -> str:
    with pytest.raises(kind) as caught:
        open_engine(machine.directory)
    message = str(caught.value)
    assert not [word for word in words if word not in message], message
    assert not [call for call in machine.trt.calls if call[1] == "deserialize_cuda_engine"]
    assert not machine.cuda.leaks
    return message


def test_plans_of_another_version(machine: Machine) -> None:
    toolchain = load_manifest(machine.directory).toolchain
    machine.edit(toolchain={**toolchain, "tensorrt-rtx": "1.6.0.3"})
    rebuild = "--backend tensorrt-rtx --precision fp16 --gpu sm89 --gpu sm120"
    refused(machine, ArtifactError, "built for TensorRT for RTX 1.6.0.3", f"found {VERSION}", rebuild)
    assert "TensorRT for RTX 1.6.0.3" in str(inspect_engine(machine.directory).problem)


def test_a_gpu_the_plans_are_not_for(machine: Machine) -> None:
    machine.cuda.sm = 86
    rebuild = "--gpu sm89 --gpu sm120 --gpu sm86"
    refused(machine, ArtifactError, "a GPU of sm89 or sm120", "found sm_86 (Pretended GPU)", rebuild)
    machine.cuda.sm = 90
    message = refused(machine, ArtifactError, "found sm_90 (Pretended GPU)", "use --backend tensorrt")
    assert "rebuild with" not in message, "the build would refuse it"
    machine.cuda.sm = 120
    open_engine(machine.directory).close()


def test_a_driver_that_is_too_old(machine: Machine) -> None:
    machine.cuda.driver = 12080
    refused(machine, ArtifactError, "a driver for CUDA 13", "CUDA 12.8", "newer NVIDIA driver")


def test_the_package_that_is_not_installed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("tensorrt_rtx", "tensorrt_rtx_bindings"):
        monkeypatch.setitem(sys.modules, module, None)
    refused(machine, MissingDependency, "built with TensorRT for RTX", VERSION, "[tensorrt-rtx]")


def test_cuda_that_is_not_installed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    refused(machine, MissingDependency, "the tensorrt-rtx backend cannot import cuda", "[tensorrt-rtx]")


# The kernels it keeps


def opened(machine: Machine) -> int:
    """Open and warm the engine, and close it; the kernels that were compiled."""
    before = machine.trt.compiled
    open_engine(machine.directory, warm=True).close()
    return machine.trt.compiled - before


def test_the_second_start_compiles_nothing(machine: Machine) -> None:
    assert opened(machine) > 10
    stored = (machine.directory / artifact.KERNEL_CACHE).read_bytes()
    assert stored.startswith(b"kernels for sm89\n")
    assert opened(machine) == 0
    assert (machine.directory / artifact.KERNEL_CACHE).read_bytes() == stored
    assert not list(machine.directory.glob(".*")), "written whole"
    inspect_engine(machine.directory)  # which verifies every file


@pytest.mark.parametrize("stored", [b"", b"kernels for sm120\nnone", b"\xff\x00 something else"])
def test_kernels_that_do_not_fit_are_compiled_anew(machine: Machine, stored: bytes) -> None:
    path = machine.directory / artifact.KERNEL_CACHE
    path.write_bytes(stored)
    assert opened(machine) > 10
    assert path.read_bytes().startswith(b"kernels for sm89\n")


def test_a_directory_nobody_may_write_to(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ddtree_trt.runtime.engines.tensorrt.opening.write_atomically", refuse)
    with caplog.at_level(logging.WARNING, "ddtree_trt.tensorrt"):
        assert opened(machine) > 10
    assert f"{artifact.KERNEL_CACHE} cannot be written (Permission denied)" in caplog.text
    assert "compiled at every start" in caplog.text


def test_captured_passes_compile_at_once_and_others_for_any_shape(machine: Machine) -> None:
    """What is compiled later would take the place of kernels that a graph holds; see `FakeContext`."""
    opened(machine)
    kernels = (machine.directory / artifact.KERNEL_CACHE).read_text().splitlines()[1:]
    assert [k for k in kernels if k.endswith(" any")] == ["drafter 0 any", "target 0 any"]  # prompts of any length
    assert len([k for k in kernels if k.startswith("target 0 [")]) >= 7
