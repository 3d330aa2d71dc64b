"""TensorRT's runtime over fake CUDA: engines whose passes ONNX Runtime computes, from and into fake device memory.

What runs is the very graph that TensorRT would compile (see `lowered.py`). Contexts insist on what TensorRT insists
on: a profile, a workspace, addresses at multiples of 256, shapes inside the profile, one pass before a capture, and
that a context is left alone once a graph was captured from it. `calls` lists every call for `real_tensorrt.check_call`.
"""

from __future__ import annotations

import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_builds import PACKAGED
from fake_cuda import FakeCuda, FakeKernels
from lowered import Lowered, LoweredPair
from plugin_libraries import emulated_kernels

from ddtree_trt import plugins
from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.files import TOKENIZER_FILES
from ddtree_trt.artifact.manifest import FileEntry, Limits, Manifest, load_manifest
from ddtree_trt.artifact.precisions import PrecisionName
from ddtree_trt.artifact.progress import no_progress
from ddtree_trt.build.backends.tensorrt.plans import write_shared
from ddtree_trt.build.backends.tensorrt.profiles import drafter_sizes, target_sizes
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.plugins import library
from ddtree_trt.runtime.decoding.latency import ContextCost, LatencyProfile, fingerprint
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.params import SamplingParams

VERSION = "11.4.0.106"
WORKSPACE_BYTES = 5000
ALIGNMENT = 256
LIMITS = Limits(max_seq_len=256, max_batch=3, max_tree_budget=40, prefill_chunk=32)  # of conftest's `lowerings`
PROMPTS = ["def fib(n):", "There are 13 muffins on Yaya's table. She sells 6 of them. How many are left?", "a"]
BLOCK = 16  # of the packaged drafter; the most a round commits
FLOATS = {"fp32": "float32", "fp16": "float16"}


class ExecutionContextAllocationStrategy(Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class ILogger(ABC):
    Severity = Enum("Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE")

    @abstractmethod
    def log(self, severity: Any, msg: str) -> None: ...


class FakeTrt:
    """Stands for the module `tensorrt`. `plans` maps a plan's bytes to the engine inside."""

    __version__ = VERSION
    ILogger, ExecutionContextAllocationStrategy = ILogger, ExecutionContextAllocationStrategy

    def __init__(self, cuda: FakeCuda, plans: dict[bytes, FakeEngine]) -> None:
        self.cuda, self.plans = cuda, plans
        self.calls: list[tuple[Any, ...]] = []
        self.loaded: list[str] = []
        self.takes_plugins = True
        for engine in plans.values():
            engine.trt = self

    def get_plugin_registry(self) -> FakeTrt:
        return self  # all that is asked of it is below

    @property
    def all_creators(self) -> list[Any]:
        creator = SimpleNamespace(
            name=plugins.ATTENTION, plugin_version=plugins.VERSION, plugin_namespace=plugins.NAMESPACE
        )
        return [creator] if self.loaded and self.takes_plugins else []

    def load_library(self, path: str) -> object:
        self.calls.append(("IPluginRegistry", "load_library", path))
        self.loaded.append(path)
        return object()

    def Runtime(self, log: Any) -> Any:
        def deserialize_cuda_engine(buffer: Any) -> Any:
            assert self.loaded, "plugins come before the plans that use them"
            plan = bytes(buffer)
            self.calls.append(("Runtime", "deserialize_cuda_engine", plan))
            if plan not in self.plans:
                log.log(ILogger.Severity.WARNING, "this is a warning")
                log.log(ILogger.Severity.ERROR, "Serialization\nassertion failed")
                return None
            self.plans[plan].log = log
            return self.plans[plan]

        return SimpleNamespace(deserialize_cuda_engine=deserialize_cuda_engine)


class FakeEngine:
    """An ICudaEngine over a session of ONNX Runtime."""

    trt: FakeTrt
    log: ILogger

    def __init__(self, name: str, lowered: Lowered, sizes: Sequence[dict[str, Any]]) -> None:
        self.name, self.session, self.types, self.sizes = name, lowered.session, lowered.types, sizes
        self.inputs = {i.name: tuple(i.shape) for i in self.session.get_inputs()}
        self.outputs = {o.name: tuple(o.shape) for o in self.session.get_outputs()}
        self._all = [*self.inputs, *self.outputs]
        self.num_io_tensors, self.num_optimization_profiles = len(self._all), len(sizes)
        self.device_memory_size_v2 = WORKSPACE_BYTES
        self.contexts = 0

    def get_tensor_name(self, index: int) -> str:
        return self._all[index]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(-1 if isinstance(d, str) else d for d in (self.inputs | self.outputs)[name])

    def create_execution_context(self, strategy: Any) -> FakeContext:
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        self.contexts += 1
        return FakeContext(self)


class FakeContext:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine, self._cuda = engine, engine.trt.cuda
        self._profile: int | None = None
        self._addresses: dict[str, int] = {}
        self._shapes = {n: s for n, s in engine.inputs.items() if not any(isinstance(d, str) for d in s)}
        self._workspace: tuple[int, int] | None = None
        self._flushed = self._captured = False

    def _record(self, method: str, *arguments: Any) -> None:
        self._engine.trt.calls.append(("IExecutionContext", method, *arguments))

    def _changed(self, method: str, *arguments: Any) -> None:
        assert not self._captured, "a graph was captured from this context"
        self._flushed = False
        self._record(method, *arguments)

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._changed("set_optimization_profile_async", profile, stream)
        assert stream in self._cuda.streams
        self._profile = profile
        return profile in range(self._engine.num_optimization_profiles)

    def set_device_memory(self, address: int, size: int) -> None:
        self._changed("set_device_memory", address, size)
        assert address % ALIGNMENT == 0 and self._cuda.device.holds(address, size)
        assert size >= self._engine.device_memory_size_v2
        self._workspace = (address, size)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._changed("set_tensor_address", name, address)
        self._addresses[name] = address
        return (name in self._engine.inputs or name in self._engine.outputs) and address % ALIGNMENT == 0

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._changed("set_input_shape", name, shape)
        assert self._profile is not None
        self._shapes[name] = shape
        sizes, wanted = self._engine.sizes[self._profile], self._engine.inputs[name]
        return len(shape) == len(wanted) and all(
            sizes[d][0] <= n <= sizes[d][2] if isinstance(d, str) else n == d
            for n, d in zip(shape, wanted, strict=True)
        )

    def infer_shapes(self) -> list[str]:
        self._record("infer_shapes")
        return [n for n in self._engine.inputs if n not in self._shapes or n not in self._addresses]

    def execute_async_v3(self, stream: int) -> bool:
        self._record("execute_async_v3", stream)
        assert stream in self._cuda.streams
        assert self._workspace is not None
        assert self._profile is not None
        assert set(self._addresses) == {*self._engine.inputs, *self._engine.outputs}
        if self._cuda.capturing is not None:
            assert self._flushed, "the first pass of new shapes must not be captured"
            self._captured = True
        self._flushed = True
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        self._cuda.enqueue(lambda: self._run(shapes, addresses), "pass", self._engine.name, self._profile)
        return True

    def _run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        def view(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return self._cuda.device.view(addresses[name], size).view(dtype).reshape(shape)

        engine = self._engine
        feed = {name: view(name, shape, engine.types[name]) for name, shape in shapes.items()}
        dims = [(d, n) for name, shape in shapes.items() for d, n in zip(engine.inputs[name], shape, strict=True)]
        for dimension in {d for d, _ in dims if isinstance(d, str)}:
            assert len({n for d, n in dims if d == dimension}) == 1, f"inputs disagree on {dimension}"
        results = dict(zip(engine.outputs, engine.session.run(list(engine.outputs), feed), strict=True))
        for name, result in results.items():
            view(name, result.shape, result.dtype)[...] = result


@dataclass
class Machine:
    """A machine that pretends: its CUDA, its TensorRT, and an engine directory built for it."""

    cuda: FakeCuda
    trt: FakeTrt
    directory: Path
    plugin_library: Path

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setitem(sys.modules, "tensorrt", self.trt)
        patch.setitem(sys.modules, "cuda.bindings.runtime", self.cuda)
        patch.setattr(library, "find", lambda name: self.plugin_library)
        patch.setattr(library, "kernels", lambda: FakeKernels(self.cuda, emulated_kernels()))

    def store_profile(self) -> None:
        """So that nothing is measured when an LLM opens the engine."""
        costs = ContextCost(64, 0.001, (1, 9, 41), (0.01, 0.011, 0.012))
        profile = LatencyProfile(fingerprint(load_manifest(self.directory), 1), "pretended", (costs,))
        (self.directory / artifact.PROFILE).write_text(profile.to_json())

    def edit(self, **changes: Any) -> None:
        """Replace fields of the manifest."""
        manifest = replace(load_manifest(self.directory), **changes)
        (self.directory / artifact.MANIFEST).write_text(manifest.to_json())


class Lowerings:
    """Engine directories of one pair, in one precision, as they would be built; lowered once, opened any number of
    times."""

    def __init__(
        self, folder: Path, target: Path, drafter: Path, like: Path, limits: Limits, precision: PrecisionName
    ) -> None:
        """`like` is an engine directory of the same pair whose tokenizer and stop tokens are taken."""
        self._folder, self._like, self._limits, self._precision = folder, like, limits, precision
        self._machines = 0
        self._target, self._drafter = load_checkpoint(target), load_checkpoint(drafter)
        self.pair = LoweredPair(folder / "graphs", self._target, self._drafter, limits, FLOATS[precision])
        if target.is_relative_to(PACKAGED) and self.pair.kind.at_once:
            assert self.pair.kind.block_size == BLOCK

    def machine(self) -> Machine:
        """Another machine, with an engine directory of its own."""
        self._machines += 1
        name = f"machine{self._machines}"
        folder = self._folder / name
        shutil.copytree(self._like, folder, ignore=shutil.ignore_patterns("*.onnx", "weights.bin", "profile.json"))
        plugin_library = self._folder / f"{name}.so"
        plugin_library.write_bytes(b"plugins")
        (folder / artifact.TARGET_PLAN).write_bytes(b"the target's plan")
        (folder / artifact.DRAFTER_PLAN).write_bytes(b"the drafter's plan")
        write_shared(folder / artifact.SHARED_WEIGHTS, self._target, self._drafter, self._precision, no_progress)
        drafter_ranges = drafter_sizes(self._limits, self.pair.kind.block_size)
        engines = {
            b"the target's plan": FakeEngine("target", self.pair.target, target_sizes(self._limits)),
            b"the drafter's plan": FakeEngine("drafter", self.pair.drafter, drafter_ranges),
        }
        manifest = self._manifest(folder, plugin_library, engines.values())
        (folder / artifact.MANIFEST).write_text(manifest.to_json())
        fake_cuda = FakeCuda()
        return Machine(fake_cuda, FakeTrt(fake_cuda, engines), folder, plugin_library)

    def _manifest(self, folder: Path, plugin_library: Path, engines: Any) -> Manifest:
        kept = (artifact.TARGET_PLAN, artifact.DRAFTER_PLAN, artifact.SHARED_WEIGHTS, *TOKENIZER_FILES)
        files = {n: FileEntry((folder / n).stat().st_size, artifact.sha256_file(folder / n)) for n in kept}
        return replace(
            load_manifest(self._like),
            backend="tensorrt",
            precision=self._precision,
            limits=self._limits,
            toolchain={"tensorrt": VERSION, "cuda": "13.0", "sm": "90", "driver": "13.0", "gpu": "Pretended GPU"},
            tensors={e.name: {"inputs": list(e.inputs), "outputs": list(e.outputs)} for e in engines},
            plugin={
                "name": plugins.ATTENTION,
                "version": plugins.VERSION,
                "namespace": plugins.NAMESPACE,
                "abi": str(plugins.ABI),
                "sha256": artifact.sha256_file(plugin_library),
            },
            files=files,
        )


@contextmanager
def installed(machine: Machine) -> Iterator[Machine]:
    with pytest.MonkeyPatch.context() as patch:
        machine.install(patch)
        yield machine


def generate(llm: LLM, prompts: list[str], **options: Any) -> list[RequestOutput]:
    return llm.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True, **options))
