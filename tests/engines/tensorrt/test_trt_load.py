"""Opening a TensorRT engine: whatever differs is refused before a plan is read, with what differs and what to do."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_builds import PACKAGED
from fake_cuda import cudaError_t
from fake_trt_engine import FORMS, Lowerings, Machine, installed
from fake_trt_runtime import VERSION
from safetensors.numpy import load_file

from ddtree_trt import plugins
from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.manifest import FileEntry, Limits, load_manifest
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.artifact.tensor_files import STORED
from ddtree_trt.device import buffers
from ddtree_trt.errors import ArtifactError, DDTreeError, EngineError, MissingDependency
from ddtree_trt.inspection import inspect_engine
from ddtree_trt.plugins import library
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.tensorrt.engine import TrtEngine

LIMITS = Limits(max_seq_len=64, max_batch=2, max_tree_budget=8, prefill_chunk=16)


@pytest.fixture(scope="module", params=["plugin", "native"])
def lowerings(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Lowerings:
    folder, form = tmp_path_factory.mktemp("lowered"), FORMS[request.param]
    return Lowerings(folder, PACKAGED / "target", PACKAGED / "drafter", tiny_engine, LIMITS, "fp16", form)


with_plugins = pytest.mark.parametrize("lowerings", ["plugin"], indirect=True)
native = pytest.mark.parametrize("lowerings", ["native"], indirect=True)


@pytest.fixture
def machine(lowerings: Lowerings) -> Iterator[Machine]:
    with installed(lowerings.machine()) as machine:
        yield machine


def refused(machine: Machine, kind: type[DDTreeError], *words: str, rebuild: bool = True) -> None:
    """Opening fails with these words, before a plan was given to TensorRT, and everything is given back."""
    with pytest.raises(kind) as caught:
        open_engine(machine.directory)
    message = str(caught.value)
    assert not [word for word in words if word not in message], message
    assert ("ddtree-trt build --target tiny" in message) == rebuild, message
    assert "--backend tensorrt --precision fp16" in message or not rebuild
    assert not [call for call in machine.trt.calls if call[1] == "deserialize_cuda_engine"]
    assert not machine.cuda.leaks


def toolchain(machine: Machine, **changes: str) -> None:
    machine.edit(toolchain={**load_manifest(machine.directory).toolchain, **changes})


def test_it_opens(machine: Machine) -> None:
    engine = open_engine(machine.directory)
    plugins = [] if machine.form.native else [str(machine.plugin_library)]
    assert machine.trt.loaded == plugins
    engine.close()
    engine = open_engine(machine.directory)  # the plugins are in the process's registry by now
    assert machine.trt.loaded == plugins
    engine.close()
    assert not machine.cuda.leaks


def test_another_tensorrt(machine: Machine) -> None:
    toolchain(machine, tensorrt="11.3.0.9")
    refused(machine, ArtifactError, "TensorRT 11.3.0.9", f"found {VERSION}")


@pytest.mark.parametrize("sm", [80, 100])
def test_another_gpu(machine: Machine, sm: int) -> None:
    machine.cuda.sm = sm
    refused(machine, ArtifactError, "sm_90 (Pretended GPU)", f"found sm_{sm} (Pretended GPU)")


def test_no_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.cuda.fail["cudaGetDeviceCount"] = cudaError_t.cudaErrorInsufficientDriver
    refused(machine, ArtifactError, "sm_90", "cudaErrorInsufficientDriver")
    monkeypatch.setattr(machine.cuda, "cudaGetDeviceCount", lambda: (cudaError_t.cudaSuccess, 0), raising=False)
    refused(machine, ArtifactError, "sm_90", "found none")


def test_another_cuda_and_an_old_driver(machine: Machine) -> None:
    machine.cuda.runtime = 12090
    refused(machine, ArtifactError, "CUDA 13.x", "found 12.9")
    machine.cuda.runtime, machine.cuda.driver = 13010, 12080
    refused(machine, ArtifactError, "driver for CUDA 13", "CUDA 12.8", "newer NVIDIA driver", rebuild=False)


@with_plugins
@pytest.mark.parametrize("field", ["name", "version", "namespace", "abi"])
def test_another_plugin(machine: Machine, field: str) -> None:
    plugin = load_manifest(machine.directory).plugin
    assert plugin is not None
    machine.edit(plugin={**plugin, field: "7"})
    refused(machine, ArtifactError, f"plugin {field} '7'")


@with_plugins
def test_another_build_of_the_plugin_library_serves(machine: Machine) -> None:
    """Of the same ABI: the number is the promise, whatever the file's bytes."""
    machine.plugin_library.write_bytes(b"the same plugins by another compiler")
    plugin = load_manifest(machine.directory).plugin or {}
    assert plugin["sha256"] != artifact.sha256_file(machine.plugin_library)
    open_engine(machine.directory).close()
    machine.trt.calls.clear()
    machine.edit(plugin={**plugin, "abi": str(plugins.ABI - 1)})
    refused(machine, ArtifactError, f"plugin abi '{plugins.ABI - 1}', this ddtree-trt has '{plugins.ABI}'")


@with_plugins
def test_no_native_library(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise MissingDependency("not built; run `make plugins`")

    monkeypatch.setattr(library, "find", missing)
    refused(machine, MissingDependency, "make plugins", rebuild=False)


@pytest.mark.parametrize("module", ["tensorrt", "cuda.bindings.runtime"])
def test_a_package_that_is_not_installed(machine: Machine, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    refused(machine, MissingDependency, module.split(".")[0], "pip install --editable '.[tensorrt]'", rebuild=False)


def test_a_gpu_that_is_too_small(machine: Machine) -> None:
    machine.cuda.memory_bytes = 1 << 20
    refused(machine, EngineError, "of GPU memory", "0.00 GB of 0.00 GB are free", "--max-batch")


def test_a_file_that_was_changed(machine: Machine) -> None:
    (machine.directory / artifact.TARGET_PLAN).write_bytes(b"the target's PLAN")
    refused(machine, ArtifactError, artifact.TARGET_PLAN, "sha256 differs")


def test_an_autoregressive_drafter_without_its_tables(machine: Machine) -> None:
    manifest = load_manifest(machine.directory)
    machine.edit(drafter_kind="autoregressive", drafter_dims=manifest.target_dims)
    refused(machine, ArtifactError, "has no tensor 'drafter.embedding'")


def rewrite(machine: Machine, name: str, data: bytes) -> None:
    """Another file whose digest the manifest knows."""
    path = machine.directory / name
    path.write_bytes(data)
    files = load_manifest(machine.directory).files
    machine.edit(files={**files, name: FileEntry(len(data), artifact.sha256_file(path))})


def test_tables_of_another_model(machine: Machine) -> None:
    stored = (machine.directory / artifact.SHARED_WEIGHTS).read_bytes()
    rewrite(machine, artifact.SHARED_WEIGHTS, stored.replace(b'"F16"', b'"I16"'))
    refused(machine, ArtifactError, "embedding should be", "F16", "I16")
    rewrite(machine, artifact.SHARED_WEIGHTS, stored.replace(b'"embedding"', b'"embeddong"'))
    refused(machine, ArtifactError, "no tensor 'embedding'")
    for data in (b"\xff" * 40, stored[:-2], stored[:20], stored.replace(b'"data_offsets": [0', b'"data_offsets": [2')):
        rewrite(machine, artifact.SHARED_WEIGHTS, data)
        refused(machine, ArtifactError, artifact.SHARED_WEIGHTS, "cannot be read")


def test_inspect_says_what_differs(machine: Machine) -> None:
    report = inspect_engine(machine.directory)
    assert report.problem is None
    assert report.memory.place == "GPU"
    plans = sum(entry.size for name, entry in report.manifest.files.items() if name.endswith(".plan"))
    dims = report.manifest.target_dims
    assert report.memory.weights_bytes == plans + (2 + 4) * dims.vocab_size * dims.hidden_size  # embedding, head
    toolchain(machine, tensorrt="11.3.0.9")
    assert "TensorRT 11.3.0.9" in str(inspect_engine(machine.directory).problem)


# From here on a plan was read


def failing(machine: Machine, kind: type[DDTreeError], match: str) -> None:
    with pytest.raises(kind, match=match):
        open_engine(machine.directory)
    assert not machine.cuda.leaks


def test_a_plan_tensorrt_does_not_take(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(machine, artifact.DRAFTER_PLAN, b"something else")
    with caplog.at_level(logging.WARNING, "ddtree_trt.tensorrt"):
        failing(machine, ArtifactError, "cannot load .*drafter.plan: Serialization assertion failed; rebuild with")
    assert caplog.messages == ["this is a warning"]


@with_plugins
def test_plugins_tensorrt_does_not_take(machine: Machine) -> None:
    machine.trt.takes_plugins = False
    failing(machine, EngineError, "does not take the plugin library")


def test_a_plan_of_another_engine(machine: Machine) -> None:
    tensors = load_manifest(machine.directory).tensors
    machine.edit(tensors={**tensors, "target": {**tensors["target"], "outputs": ["logits"]}})
    failing(machine, ArtifactError, "the manifest and the target's plan differ in tensor choices")
    machine.edit(tensors=tensors, limits=replace(LIMITS, max_batch=3))
    if machine.form.native:
        machine.edit(tensors=tensors, limits=replace(LIMITS, max_seq_len=63))
    expected, found = ("-1, 2, 79", "-1, 2, 80") if machine.form.native else ("3, 2, 80", "2, 2, 80")
    failing(machine, ArtifactError, rf"past_key.0 of the target should be \({expected}, 64\), found \({found}, 64\)")


def test_a_commit_plan_of_another_engine(machine: Machine) -> None:
    rewrite(machine, artifact.COMPACTION_PLAN, b"the drafter's plan")
    failing(machine, ArtifactError, "the manifest and the compaction's plan differ in tensor")


@native
def test_slots_that_begin_where_tensorrt_takes_no_address(machine: Machine) -> None:
    dims = load_manifest(machine.directory).drafter_dims
    machine.edit(drafter_dims=replace(dims, num_kv_heads=1, num_heads=1), limits=replace(LIMITS, max_seq_len=63))
    refused(machine, ArtifactError, "a slot of the drafter's cache is 10112 bytes, expected a multiple of 256")


def test_memory_that_runs_out_after_all(machine: Machine) -> None:
    machine.cuda.fail["cudaMalloc"] = cudaError_t.cudaErrorMemoryAllocation
    failing(machine, EngineError, "cudaMalloc failed with cudaErrorMemoryAllocation")
    machine.cuda.fail["cudaHostAlloc"] = cudaError_t.cudaErrorMemoryAllocation
    failing(machine, EngineError, "cudaHostAlloc failed with cudaErrorMemoryAllocation")


def test_one_block_laid_out_before_it_is_allocated(machine: Machine) -> None:
    engine = open_engine(machine.directory)
    layout = engine.layout  # type: ignore[attr-defined]
    assert [entry for entry in machine.cuda.log if entry[0] == "malloc"] == [("malloc", layout.total_bytes)]
    ends = [layout.offsets[name] + size for name, size in layout.sizes.items()]
    starts = [*layout.offsets.values(), layout.total_bytes]
    assert all(start % buffers.ALIGNMENT == 0 for start in starts)
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=True))
    engine.close()


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_a_head_becomes_float32_on_its_way(precision: str, dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.0078125, 6e-5, 3.0e4, -65280.0, float("inf")]).to(dtype)
    stored = values.view(torch.uint8).numpy().copy().view(STORED[PRECISIONS[precision].safetensors])
    found = stored.astype(np.float32)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), values.float().numpy().view(np.uint32))


@pytest.mark.parametrize("piece", [256, 1 << 24])
def test_the_head_is_on_the_device_once_more_in_float32(
    machine: Machine, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packaged target ties it to the embedding: the plan reads both, at addresses of their own."""
    monkeypatch.setattr("ddtree_trt.runtime.engines.tensorrt.opening._PIECE_BYTES", piece)
    engine = open_engine(machine.directory)
    assert isinstance(engine, TrtEngine)
    sizes, at = engine.layout.sizes, engine._loaded.addresses
    dims = engine.manifest.target_dims
    assert sizes[buffers.HEAD] == 4 * dims.vocab_size * dims.hidden_size
    stored = load_file(machine.directory / artifact.SHARED_WEIGHTS)
    assert set(stored) == {"embedding"}
    head = machine.cuda.device.view(at[buffers.HEAD], sizes[buffers.HEAD]).view(np.float32)
    np.testing.assert_array_equal(head.reshape(stored["embedding"].shape), stored["embedding"].astype(np.float32))
    assert engine._loaded.target_tables == {"embedding": at[buffers.EMBEDDING], "lm_head": at[buffers.HEAD]}
    engine.close()
