"""The TensorRT part of a build: both graphs compiled on this machine's GPU, and the tables both plans read."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_trt import plugins
from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.files import sha256_file
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.artifact.precisions import BACKEND_PRECISIONS, PRECISIONS, BackendName, PrecisionName
from ddtree_trt.artifact.progress import Progress
from ddtree_trt.artifact.toolchain import installed_versions
from ddtree_trt.build.backends.base import BuilderOptions, Written
from ddtree_trt.build.backends.tensorrt.machine import LOWEST_FP8_SM, Machine, examine
from ddtree_trt.errors import UsageError

if TYPE_CHECKING:
    from onnx import ModelProto

    from ddtree_trt.build.checkpoint.reader import Checkpoint
    from ddtree_trt.build.graph.ops import Sink


class TensorRtBuild:
    """`BackendBuild` for NVIDIA GPUs. Plans run on the GPU model and the TensorRT version they were compiled with."""

    name: BackendName = "tensorrt"
    precisions: tuple[PrecisionName, ...] = tuple(p for p in BACKEND_PRECISIONS["tensorrt"] if PRECISIONS[p].half)

    def __init__(self, options: BuilderOptions) -> None:
        self._options = options

    @cached_property
    def machine(self) -> Machine:
        """This machine's versions and GPU. Raises MissingDependency or BuildError where it cannot build."""
        return examine()

    @property
    def toolchain(self) -> dict[str, str]:
        machine = self.machine
        return {
            "tensorrt": machine.tensorrt,
            "cuda": machine.cuda,
            "sm": str(machine.sm),
            "driver": machine.driver,
            "gpu": machine.gpu,
            "python": platform.python_version(),
            **installed_versions("numpy", "onnx"),
        }

    def drafter_rows(self, block: int) -> int:
        return block

    def bytes_on_disk(self, target: Checkpoint, drafter: Checkpoint, precision: PrecisionName) -> int:
        # While a network is compiled its weights are on disk twice: as the parser reads them, and in the plan.
        return 2 * target.stored_bytes(2) + 2 * drafter.num_values

    def write(
        self,
        directory: Path,
        target: Checkpoint,
        drafter: Checkpoint,
        limits: Limits,
        precision: PrecisionName,
        progress: Progress,
    ) -> Written:
        _check_supported(target, drafter, self.machine)
        from ddtree_trt.build.backends.tensorrt.plan import EngineBuilder
        from ddtree_trt.build.backends.tensorrt.profiles import drafter_sizes, profile, target_sizes
        from ddtree_trt.build.graph.drafters import build_drafter
        from ddtree_trt.build.graph.lowering_plugin import PluginGraph
        from ddtree_trt.build.graph.networks import build_target_graph

        machine, floats = self.machine, PRECISIONS[precision].dtype
        taps, tied = drafter.kind.tap_layers, target.tie_word_embeddings

        def target_graph(sink: Sink) -> ModelProto:
            g = PluginGraph("target", sink, floats)
            return build_target_graph(
                g, target.dims, target.tensor, tap_layers=taps, limits=limits, tied=tied, quantized=target
            )

        def drafter_graph(sink: Sink) -> ModelProto:
            return build_drafter(PluginGraph("drafter", sink, floats), drafter, target, limits)

        # Outside of the directory that is built: later builds use it too.
        cache = directory.parent / f"tensorrt-{machine.tensorrt}-sm{machine.sm}.timing"
        builder = EngineBuilder(machine.plugins, cache, self._options, progress)
        tensors = {}
        for name, plan, network, make, ranges, expected in (
            ("target", artifact.TARGET_PLAN, target, target_graph, target_sizes(limits), target.stored_bytes(2)),
            (
                *("drafter", artifact.DRAFTER_PLAN, drafter, drafter_graph),
                *(drafter_sizes(limits, drafter.kind.block_size), 2 * drafter.num_values),
            ),
        ):
            with tempfile.TemporaryDirectory(dir=directory) as folder:
                path = Path(folder) / f"{name}.onnx"
                graph = _write_graph(path, make, expected_bytes=expected, progress=progress)
                profiles = [profile(graph.graph.input, each) for each in ranges]
                tensors[name] = builder.build(
                    name, path, directory / plan, profiles, attentions=network.dims.num_layers
                )
        write_shared(directory / artifact.SHARED_WEIGHTS, target, drafter, precision, progress)
        return Written(tensors, {**plugins.IDENTITY, "sha256": sha256_file(machine.plugins)})


def _write_graph(
    path: Path, make: Callable[[Sink], ModelProto], *, expected_bytes: int, progress: Progress
) -> ModelProto:
    """The graph that `make` returns, written to `path` with its weights in a file beside it."""
    from ddtree_trt.build.graph.weights import WeightFile

    with WeightFile(path.with_name(artifact.WEIGHTS), expected_bytes=expected_bytes, progress=progress) as sink:
        graph = make(sink)
    path.write_bytes(graph.SerializeToString())
    return graph


def write_shared(
    path: Path, target: Checkpoint, drafter: Checkpoint, precision: PrecisionName, progress: Progress
) -> None:
    """Write the tables that both plans read, [V, H] each: the embedding and, unless tied to it, the language-model
    head, of the target and of a drafter with its own."""
    from ddtree_trt.artifact.number_bytes import encode
    from ddtree_trt.artifact.safetensor_header import safetensors_header
    from ddtree_trt.models.decoder import EMBEDDING, HEAD

    tables = {}
    for prefix, network in {"": target, **({names.DRAFTER: drafter} if drafter.kind.own_tables else {})}.items():
        tables[prefix + names.EMBEDDING] = network, EMBEDDING
        if not network.tie_word_embeddings:
            tables[prefix + names.HEAD] = network, HEAD
    shapes = {name: network.shapes[source] for name, (network, source) in tables.items()}
    stored = PRECISIONS[precision]
    with path.open("xb") as file:
        file.write(safetensors_header(shapes, stored))
        for done, (network, source) in enumerate(tables.values()):
            progress("write shared tables", done, len(tables))
            file.write(encode(network.tensor(source), stored.dtype, source).data)
    progress("write shared tables", len(tables), len(tables))


def _check_supported(target: Checkpoint, drafter: Checkpoint, machine: Machine) -> None:
    """Raises UsageError for a pair that the plugin or the GPU does not support."""
    for network in (target.dims, drafter.dims):
        if network.head_dim not in plugins.HEAD_DIMS:
            sizes = " or ".join(map(str, plugins.HEAD_DIMS))
            raise UsageError(
                f"heads of {network.head_dim} values have no kernel, heads of {sizes} have; use --backend onnxruntime"
            )
    quantization = target.quantization
    if quantization and quantization.format.values == "float8_e4m3fn" and machine.sm < LOWEST_FP8_SM:
        raise UsageError(
            f"{target.name} is quantised to FP8, which needs compute capability {LOWEST_FP8_SM / 10} or newer, and "
            f"{machine.gpu} has {machine.sm / 10}; use the checkpoint before quantisation"
        )
