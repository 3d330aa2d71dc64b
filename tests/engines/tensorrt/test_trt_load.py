"""Opening an engine of TensorRT or TensorRT for RTX: whatever differs is refused before a plan is read, with what
differs and what to do; and the kernels that TensorRT for RTX keeps."""

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_builds import PACKAGED
from fake_cuda import cudaError_t
from fake_trt_engine import FORMS, RTX, Lowerings, Machine, installed
from fake_trt_runtime import VERSION
from safetensors.numpy import load_file

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.manifest import FileEntry, Limits, load_manifest
from ddtree_trt.device import buffers
from ddtree_trt.doctor import inspect_engine
from ddtree_trt.errors import ArtifactError, DDTreeError, EngineError, MissingDependency
from ddtree_trt.plugins import library
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.tensorrt.engine import TrtEngine

LIMITS = Limits(max_seq_len=64, max_batch=2, max_tree_budget=8, prefill_chunk=16)
ALL = {**FORMS, "rtx": RTX}
REBUILD = "ddtree-trt build --target tiny"


@pytest.fixture(scope="module", params=ALL)
def lowerings(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Lowerings:
    folder, form = tmp_path_factory.mktemp("lowered"), ALL[request.param]
    return Lowerings(folder, PACKAGED / "target", PACKAGED / "drafter", tiny_engine, LIMITS, "fp16", form)


def of(*forms: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("lowerings", forms, indirect=True)


@pytest.fixture
def machine(lowerings: Lowerings) -> Iterator[Machine]:
    with installed(lowerings.machine()) as machine:
        yield machine


def failing(machine: Machine, kind: type[DDTreeError], *words: str) -> str:
    """Opening fails with these words, and everything is given back."""
    with pytest.raises(kind) as caught:
        open_engine(machine.directory)
    message = str(caught.value)
    assert not [word for word in words if word not in message], message
    assert not machine.cuda.leaks
    return message


def refused(machine: Machine, kind: type[DDTreeError], *words: str) -> str:
    """As `failing`, before a plan was given to TensorRT. The command that rebuilds the engine is whole."""
    message = failing(machine, kind, *words)
    options = f"--backend {machine.form.backend} --precision fp16"
    options += " --gpu sm89 --gpu sm120" if machine.form is RTX else ""
    assert REBUILD not in message or options in message
    assert not [call for call in machine.trt.calls if call[1] == "deserialize_cuda_engine"]
    return message


def toolchain(machine: Machine, **changes: str) -> None:
    machine.edit(toolchain={**load_manifest(machine.directory).toolchain, **changes})


def rewrite(machine: Machine, name: str, data: bytes) -> None:
    """Another file whose digest the manifest knows."""
    path = machine.directory / name
    path.write_bytes(data)
    files = load_manifest(machine.directory).files
    machine.edit(files={**files, name: FileEntry(len(data), artifact.sha256_file(path))})


def test_it_opens(machine: Machine) -> None:
    wanted = [] if machine.form.native else [str(machine.plugin_library)]
    for _ in range(2):  # the second time the plugins are in the process's registry
        open_engine(machine.directory).close()
        assert machine.trt.loaded == wanted
    assert not machine.cuda.leaks


# What is refused

Change = Callable[[Machine, pytest.MonkeyPatch], Any]


@dataclass(frozen=True)
class Refusal:
    change: Change
    words: tuple[str, ...]
    kind: type[DDTreeError] = ArtifactError
    rebuild: bool = True  # whether the advice is to rebuild it
    forms: tuple[str, ...] = tuple(ALL)


def edit_plugin(field: str, value: str) -> Change:
    def change(machine: Machine, patch: pytest.MonkeyPatch) -> None:
        machine.edit(plugin={**(load_manifest(machine.directory).plugin or {}), field: value})

    return change


def without(*modules: str) -> Change:
    def change(machine: Machine, patch: pytest.MonkeyPatch) -> None:
        for module in modules:
            patch.setitem(sys.modules, module, None)

    return change


def set_cuda(**values: Any) -> Change:
    return lambda machine, patch: vars(machine.cuda).update(values)


def no_library(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise MissingDependency("not built; run `make plugins`")

    patch.setattr(library, "find", missing)


TENSORRT = tuple(FORMS)
REFUSALS = {
    "another TensorRT": Refusal(
        lambda m, _: toolchain(m, tensorrt="11.3.0.9"), ("TensorRT 11.3.0.9", f"found {VERSION}"), forms=TENSORRT
    ),
    "a newer GPU": Refusal(set_cuda(sm=100), ("sm_90 (Pretended GPU)", "found sm_100"), forms=TENSORRT),
    "a GPU of another kind": Refusal(
        set_cuda(sm=86), ("a GPU of sm89 or sm120", "found sm_86", "--gpu sm120 --gpu sm86"), forms=("rtx",)
    ),
    "a GPU that RTX does not serve": Refusal(
        set_cuda(sm=90), ("found sm_90 (Pretended GPU)", "use --backend tensorrt"), rebuild=False, forms=("rtx",)
    ),
    "an old driver": Refusal(
        lambda m, _: m.cuda.fail.update(cudaGetDeviceCount=cudaError_t.cudaErrorInsufficientDriver),
        ("none that CUDA can use",),
    ),
    "no GPU": Refusal(set_cuda(count=0), ("a GPU of sm", "found none")),
    "another CUDA": Refusal(set_cuda(runtime=12090), ("CUDA 13.x", "found 12.9"), forms=TENSORRT),
    "another plugin": Refusal(edit_plugin("name", "7"), ("plugin name '7'",), forms=("plugin",)),
    "another ABI": Refusal(edit_plugin("abi", "7"), ("plugin abi '7'",), forms=("plugin",)),
    "no plugin library": Refusal(no_library, ("make plugins",), MissingDependency, rebuild=False, forms=("plugin",)),
    "no TensorRT": Refusal(
        without("tensorrt"), ("pip install --editable '.[tensorrt]'",), MissingDependency, False, TENSORRT
    ),
    "no TensorRT for RTX": Refusal(
        without("tensorrt_rtx", "tensorrt_rtx_bindings"),
        ("built with TensorRT for RTX", VERSION, "[tensorrt-rtx]"),
        MissingDependency,
        False,
        ("rtx",),
    ),
    "no cuda-python": Refusal(
        without("cuda.bindings.runtime"), ("backend cannot import cuda", "[tensorrt"), MissingDependency, False
    ),
    "a GPU that is too small": Refusal(
        set_cuda(memory_bytes=1 << 20), ("of GPU memory", "0.00 GB of 0.00 GB are free", "--max-batch"), EngineError
    ),
}


@pytest.mark.parametrize(
    ("lowerings", "name"),
    [(form, name) for form in ALL for name, refusal in REFUSALS.items() if form in refusal.forms],
    indirect=["lowerings"],
)
def test_what_differs_is_refused(machine: Machine, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = REFUSALS[name]
    refusal.change(machine, monkeypatch)
    assert (REBUILD in refused(machine, refusal.kind, *refusal.words)) == refusal.rebuild


@of("rtx")
def test_any_kind_of_gpu_that_it_was_built_for_serves(machine: Machine) -> None:
    machine.cuda.sm = 120
    open_engine(machine.directory).close()


@of("plugin")
def test_another_build_of_the_plugin_library_serves(machine: Machine) -> None:
    """Of the same ABI: the number is the promise, whatever the file's bytes."""
    machine.plugin_library.write_bytes(b"the same plugins by another compiler")
    assert (load_manifest(machine.directory).plugin or {})["sha256"] != artifact.sha256_file(machine.plugin_library)
    open_engine(machine.directory).close()


@of("plugin", "native")
def test_tables_that_cannot_be_read(machine: Machine) -> None:
    stored = (machine.directory / artifact.SHARED_WEIGHTS).read_bytes()
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
    toolchain(machine, **{machine.form.backend: "1.0.0.9"})
    assert "1.0.0.9" in str(inspect_engine(machine.directory).problem)


# From here on a plan was read


@of("plugin", "native")
def test_a_plan_tensorrt_does_not_take(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(machine, artifact.DRAFTER_PLAN, b"something else")
    with caplog.at_level(logging.WARNING, "ddtree_trt.tensorrt"):
        failing(machine, ArtifactError, "drafter.plan: Serialization assertion failed; rebuild with", "cannot load")
    assert caplog.messages == ["this is a warning"]


@of("plugin")
def test_memory_that_runs_out_after_all(machine: Machine) -> None:
    for function in ("cudaMalloc", "cudaHostAlloc"):
        machine.cuda.fail[function] = cudaError_t.cudaErrorMemoryAllocation
        failing(machine, EngineError, f"{function} failed with cudaErrorMemoryAllocation")


@of("plugin", "native")
def test_the_head_is_on_the_device_once_more_in_float32(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packaged target ties it to the embedding: the plan reads both, at addresses of their own."""
    monkeypatch.setattr("ddtree_trt.runtime.engines.tensorrt.opening._PIECE_BYTES", 256)
    engine = open_engine(machine.directory)
    assert isinstance(engine, TrtEngine)
    sizes, at = engine._loaded.layout.sizes, engine._loaded.addresses
    dims = engine.manifest.target_dims
    assert sizes[buffers.HEAD] == 4 * dims.vocab_size * dims.hidden_size
    stored = load_file(machine.directory / artifact.SHARED_WEIGHTS)
    assert set(stored) == {"embedding"}
    head = machine.cuda.device.view(at[buffers.HEAD], sizes[buffers.HEAD]).view(np.float32)
    np.testing.assert_array_equal(head.reshape(stored["embedding"].shape), stored["embedding"].astype(np.float32))
    assert engine._loaded.target_tables == {"embedding": at[buffers.EMBEDDING], "lm_head": at[buffers.HEAD]}
    engine.close()


# The kernels that TensorRT for RTX keeps


def opened(machine: Machine) -> int:
    """Open and warm the engine, and close it; the kernels that were compiled."""
    before = machine.trt.compiled
    open_engine(machine.directory, warm=True).close()
    return machine.trt.compiled - before


@of("rtx")
def test_the_second_start_compiles_nothing(machine: Machine) -> None:
    assert opened(machine) > 10
    stored = (machine.directory / artifact.KERNEL_CACHE).read_bytes()
    assert stored.startswith(b"kernels for sm89\n")
    # What is compiled later would take the place of kernels that a graph holds; see `FakeContext`.
    kernels = stored.decode().splitlines()[1:]
    assert [k for k in kernels if k.endswith(" any")] == ["target 0 any"]  # prompts of any length
    assert len([k for k in kernels if k.startswith("target 0 [")]) >= len(buffers.buckets(9))
    assert opened(machine) == 0
    assert (machine.directory / artifact.KERNEL_CACHE).read_bytes() == stored
    assert not list(machine.directory.glob(".*")), "written whole"
    inspect_engine(machine.directory)  # which verifies every file


@of("rtx")
@pytest.mark.parametrize("stored", [b"kernels for sm120\nnone", b"\xff\x00 something else"])
def test_kernels_that_do_not_fit_are_compiled_anew(machine: Machine, stored: bytes) -> None:
    path = machine.directory / artifact.KERNEL_CACHE
    path.write_bytes(stored)
    assert opened(machine) > 10
    assert path.read_bytes().startswith(b"kernels for sm89\n")


@of("rtx")
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
