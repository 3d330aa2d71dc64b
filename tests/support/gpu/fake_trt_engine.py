"""Engine directories for pretended machines: of either lowering of the graphs, for TensorRT and TensorRT for RTX."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from engine_builds import PACKAGED
from fake_cuda import FakeCuda
from fake_trt_runtime import VERSION, FakeEngine, FakeTrt
from lowered import Session

from ddtree_trt import plugins
from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.backends import TENSORRT, BackendName
from ddtree_trt.artifact.files import TOKENIZER_FILES
from ddtree_trt.artifact.manifest import FileEntry, Limits, Manifest, load_manifest
from ddtree_trt.artifact.precisions import PRECISIONS, PrecisionName
from ddtree_trt.artifact.progress import no_progress
from ddtree_trt.build.backends.base import Inputs
from ddtree_trt.build.backends.tensorrt import plans
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.build.graph.weights import WeightFile
from ddtree_trt.device.buffers import with_aligned_slots
from ddtree_trt.errors import MissingDependency
from ddtree_trt.plugins import library
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.profile import PassTimes, Profile, fingerprint, store
from ddtree_trt.runtime.engines.tensorrt.engine import TrtEngine
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.params import SamplingParams

LIMITS = Limits(max_seq_len=256, max_batch=3, max_tree_budget=40, prefill_chunk=32)  # of conftest's `lowerings`
PROMPTS = ["def fib(n):", "There are 13 muffins on Yaya's table. She sells 6 of them. How many are left?", "a"]
BLOCK = 16  # of the packaged drafter; the most a round commits


@dataclass(frozen=True)
class Form:
    """What an engine is made of."""

    native: bool = False  # whether attention is TensorRT's own
    backend: BackendName = "tensorrt"

    @property
    def toolchain(self) -> dict[str, str]:
        if self.backend == "tensorrt-rtx":
            return {"tensorrt-rtx": VERSION, "gpus": "sm89 sm120"}
        return {"tensorrt": VERSION, "cuda": "13.0", "sm": "90", "driver": "13.0", "gpu": "Pretended GPU"}


PLUGIN = Form()
RTX = Form(native=True, backend="tensorrt-rtx")
FORMS = {"plugin": PLUGIN, "native": Form(native=True)}  # of the tests that run on every form


@dataclass
class Machine:
    """A machine that pretends: its CUDA, its TensorRT, and an engine directory built for it."""

    cuda: FakeCuda
    trt: FakeTrt
    directory: Path
    plugin_library: Path
    form: Form

    def install(self, patch: pytest.MonkeyPatch) -> None:
        def missing(*_: Any) -> Any:
            raise MissingDependency("not built; run `make plugins`")

        patch.setitem(sys.modules, self.form.backend.replace("-", "_"), self.trt)
        patch.setitem(sys.modules, "cuda.bindings.runtime", self.cuda)
        patch.setattr(library, "find", missing if self.form.native else lambda name: self.plugin_library)

    def store_profile(self) -> None:
        """So that nothing is measured when an LLM opens the engine."""
        times = PassTimes(1, 64, 0.001, ((1, 0.01), (9, 0.011), (41, 0.012)))
        store(self.directory, Profile(fingerprint(load_manifest(self.directory), 1), times))

    def edit(self, **changes: Any) -> None:
        """Replace fields of the manifest."""
        manifest = replace(load_manifest(self.directory), **changes)
        (self.directory / artifact.MANIFEST).write_text(manifest.to_json())


class Lowerings:
    """Engine directories of one pair, in one precision, as they would be built; lowered once, opened any number of
    times."""

    def __init__(
        self,
        folder: Path,
        target: Path,
        drafter: Path,
        like: Path,
        limits: Limits,
        precision: PrecisionName,
        form: Form = PLUGIN,
    ) -> None:
        """`like` is an engine directory of the same pair whose tokenizer and stop tokens are taken."""
        self._target, self._drafter = load_checkpoint(target), load_checkpoint(drafter)
        if form.native:
            pair = (self._target.dims, self._drafter.dims)
            limits = with_aligned_slots(limits, pair, PRECISIONS[precision].value_bytes)
        self._folder, self._like, self._limits, self._precision, self.form = folder, like, limits, precision, form
        self._machines = 0
        self._networks: list[tuple[plans.Network, Session]] = []
        with pytest.MonkeyPatch.context() as patch:
            # ONNX Runtime computes nothing in bf16 on a CPU.
            patch.setattr(plans, "block_drafter_precision", lambda engine: engine)
            inputs = Inputs(self._target, self._drafter, limits, precision)
            for network in plans.networks(inputs, "native" if form.native else "plugin"):
                graphs = folder / "graphs" / network.name
                graphs.mkdir(parents=True)
                with WeightFile(graphs / artifact.WEIGHTS) as sink:
                    graph = network.make(sink)
                self._networks.append((network, Session(graphs / "graph.onnx", graph)))

    @classmethod
    def packaged(cls, folder: Path, like: Path, form: Form = PLUGIN, precision: PrecisionName = "fp32") -> Lowerings:
        """Of the packaged pair."""
        return cls(folder, PACKAGED / "target", PACKAGED / "drafter", like, LIMITS, precision, form)

    def machine(self) -> Machine:
        """Another machine, with an engine directory of its own."""
        self._machines += 1
        name = f"machine{self._machines}"
        folder = self._folder / name
        shutil.copytree(self._like, folder, ignore=shutil.ignore_patterns("*.onnx", "weights.bin", "profile.json"))
        plugin_library = self._folder / f"{name}.so"
        plugin_library.write_bytes(b"plugins")
        engines = {}
        for network, session in self._networks:
            plan = f"the {network.name}'s plan".encode()
            (folder / network.plan).write_bytes(plan)
            engines[plan] = FakeEngine(network.name, session, network.sizes)
        plans.write_shared(folder / artifact.SHARED_WEIGHTS, self._target, self._drafter, self._precision, no_progress)
        manifest = self._manifest(folder, plugin_library, engines.values())
        (folder / artifact.MANIFEST).write_text(manifest.to_json())
        fake_cuda = FakeCuda(sm=89 if self.form.backend == "tensorrt-rtx" else 90)
        return Machine(fake_cuda, FakeTrt(fake_cuda, engines), folder, plugin_library, self.form)

    def _manifest(self, folder: Path, plugin_library: Path, engines: Any) -> Manifest:
        kept = (*TENSORRT.files, *TOKENIZER_FILES)
        files = {n: FileEntry((folder / n).stat().st_size, artifact.sha256_file(folder / n)) for n in kept}
        return replace(
            load_manifest(self._like),
            backend=self.form.backend,
            precision=self._precision,
            limits=self._limits,
            toolchain=self.form.toolchain,
            tensors={e.name: {"inputs": list(e.inputs), "outputs": list(e.outputs)} for e in engines},
            plugin=None if self.form.native else plugins.IDENTITY | {"sha256": artifact.sha256_file(plugin_library)},
            files=files,
        )


@contextmanager
def installed(machine: Machine) -> Iterator[Machine]:
    with pytest.MonkeyPatch.context() as patch:
        machine.install(patch)
        yield machine


def build_trt_engine(
    target: Path,
    drafter: Path,
    engine: Path,
    *,
    form: Form = PLUGIN,
    precision: PrecisionName = "fp32",
    prefill_chunk: int = Limits.prefill_chunk,
    **options: Any,
) -> TrtEngine:
    """An engine on a pretended machine, with files below the folder `engine`; `options` are of the build."""
    like = engine / "like"
    request = BuildRequest(target="pair", checkpoint=target, drafter=drafter, output=like, **options)
    limits = replace(compile_engine(request).limits, prefill_chunk=prefill_chunk)
    with installed(Lowerings(engine, target, drafter, like, limits, precision, form).machine()) as machine:
        opened = open_engine(machine.directory)
    assert isinstance(opened, TrtEngine)
    return opened


def generate(llm: LLM, prompts: list[str], **options: Any) -> list[RequestOutput]:
    return llm.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True, **options))
