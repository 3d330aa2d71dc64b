"""The ONNX Runtime part of a build: both graphs and the weight file they share."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.backends import ONNXRUNTIME
from ddtree_trt.artifact.precisions import PRECISIONS, PrecisionName
from ddtree_trt.artifact.progress import Progress
from ddtree_trt.artifact.toolchain import installed_versions
from ddtree_trt.build.backends.base import BackendBuild, Inputs, Written
from ddtree_trt.device.buffers import FLOAT_BYTES
from ddtree_trt.errors import UsageError
from ddtree_trt.models.decoder import EMBEDDING, HEAD, TransformerDims

if TYPE_CHECKING:
    from onnx import ModelProto

    from ddtree_trt.build.checkpoint.outline import Outline


_VALUES = "self_attn.v_proj.weight"  # ends the name of the projection of a layer's values


class OnnxRuntimeBuild(BackendBuild):
    backend = ONNXRUNTIME

    def check(self, networks: Iterable[TransformerDims], precision: PrecisionName) -> None:
        for dims in networks if PRECISIONS[precision].quantized else ():
            if dims.experts or dims.delta:
                which = "mixtures of experts" if dims.experts else "gated delta-net layers"
                raise UsageError(f"{which} are not implemented in {precision}; use --precision fp32")

    def write(self, directory: Path, inputs: Inputs, progress: Progress) -> Written:
        target, drafter, precision = inputs.target, inputs.drafter, inputs.precision
        from ddtree_trt.build.graph.lowering_onnxruntime import Int8Graph, OnnxRuntimeGraph
        from ddtree_trt.build.graph.networks import build_target_graph
        from ddtree_trt.build.graph.weights import WeightFile

        expected = weight_bytes(target, precision) + weight_bytes(drafter, precision)
        taps = drafter.kind.tap_layers
        graphs = Int8Graph if PRECISIONS[precision].quantized else OnnxRuntimeGraph
        names = {}
        with WeightFile(directory / artifact.WEIGHTS, expected_bytes=expected, progress=progress) as sink:
            graph = build_target_graph(graphs("target", sink), target, inputs.limits, taps)
            names["target"] = _write_graph(directory / artifact.TARGET_GRAPH, graph)
            graph = drafter.kind.load("graph")(graphs("drafter", sink), drafter, target, inputs.limits)
            names["drafter"] = _write_graph(directory / artifact.DRAFTER_GRAPH, graph)
        versions = installed_versions("numpy", "onnx", ONNXRUNTIME.name)
        return Written(names, {"python": platform.python_version(), **versions})


def weight_bytes(network: Outline, precision: PrecisionName) -> int:
    """Bytes of a network's tensors in the weight file. In int8 a projection [out, in] takes a byte per value and a
    scale per output, that of values twice; so does the head, which is stored apart from the embedding even when tied to
    it. A language model has two matrices [H, H] for its rotation."""
    shapes, unrounded = network.shapes, network.kind.unrounded
    sizes = {name: FLOAT_BYTES * math.prod(shape) for name, shape in shapes.items()}
    if PRECISIONS[precision].quantized:
        heads = {HEAD: shapes[EMBEDDING]} if EMBEDDING in shapes else {}
        for name, shape in {**heads, **shapes}.items():
            if len(shape) == 2 and name != EMBEDDING and name not in unrounded:
                sizes[name] = (math.prod(shape) + FLOAT_BYTES * shape[0]) * (2 if name.endswith(_VALUES) else 1)
        if EMBEDDING in shapes:
            sizes["rotation"] = 2 * FLOAT_BYTES * shapes[EMBEDDING][1] ** 2
    return sum(sizes.values())


def _write_graph(path: Path, graph: ModelProto) -> dict[str, list[str]]:
    path.write_bytes(graph.SerializeToString())
    return {"inputs": [i.name for i in graph.graph.input], "outputs": [o.name for o in graph.graph.output]}
