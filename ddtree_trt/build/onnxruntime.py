"""The ONNX Runtime half of a build: both graphs and the weight file they share."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_trt import artifact
from ddtree_trt.artifact import DrafterDims, Limits, Progress, always_causal, installed_versions
from ddtree_trt.build.backend import BackendName, PrecisionName, Written

if TYPE_CHECKING:
    from onnx import ModelProto

    from ddtree_trt.build.checkpoint import Checkpoint


class OnnxRuntimeBuild:
    """`BackendBuild` for the CPU."""

    name: BackendName = "onnxruntime"
    precisions: tuple[PrecisionName, ...] = ("fp32",)

    def __init__(self) -> None:
        self.toolchain = {
            "python": platform.python_version(),
            **installed_versions("numpy", "onnx", "onnxruntime"),
        }

    def drafter_rows(self, block: int) -> int:
        return 2 * block if always_causal(self.toolchain) else block

    def bytes_on_disk(self, target: Checkpoint, drafter: Checkpoint, precision: PrecisionName) -> int:
        return 4 * (target.num_values + drafter.num_values)

    def write(
        self,
        directory: Path,
        target: Checkpoint,
        drafter: Checkpoint,
        limits: Limits,
        precision: PrecisionName,
        progress: Progress,
    ) -> Written:
        from ddtree_trt.build.graph import build_drafter_graph, build_target_graph
        from ddtree_trt.build.ops_onnxruntime import OnnxRuntimeGraph
        from ddtree_trt.build.weights import WeightFile

        expected = self.bytes_on_disk(target, drafter, precision)
        dims = drafter.dims
        taps = dims.tap_layers if isinstance(dims, DrafterDims) else ()
        names = {}
        with WeightFile(directory / artifact.WEIGHTS, expected_bytes=expected, progress=progress) as sink:
            tied = target.tie_word_embeddings
            g = OnnxRuntimeGraph("target", sink)
            graph = build_target_graph(g, target.dims, target.tensor, tap_layers=taps, limits=limits, tied=tied)
            names["target"] = _write_graph(directory / artifact.TARGET_GRAPH, graph)
            if isinstance(dims, DrafterDims):
                g = OnnxRuntimeGraph("drafter", sink, always_causal=always_causal(self.toolchain))
                graph = build_drafter_graph(
                    g, dims, drafter.tensor, target_weights=target.tensor, target_tied=tied, limits=limits
                )
            else:
                g = OnnxRuntimeGraph("target", sink)
                tied = drafter.tie_word_embeddings
                graph = build_target_graph(
                    g, dims, drafter.tensor, tap_layers=(), limits=limits, tied=tied, prefix="drafter."
                )
            names["drafter"] = _write_graph(directory / artifact.DRAFTER_GRAPH, graph)
        return Written(names)


def _write_graph(path: Path, graph: ModelProto) -> dict[str, list[str]]:
    path.write_bytes(graph.SerializeToString())
    return {"inputs": [i.name for i in graph.graph.input], "outputs": [o.name for o in graph.graph.output]}
