"""Small networks of the real structure, lowered and written where a parser reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from onnx import ModelProto, NodeProto, TensorProto, helper

from ddtree_trt import plugins
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.checkpoint.reader import Checkpoint
from ddtree_trt.build.graph.lowering_tensorrt import TensorRtGraph
from ddtree_trt.build.graph.networks import build_target_graph
from ddtree_trt.build.graph.ops import TYPES, Sink
from ddtree_trt.build.graph.weights import WeightFile

DIMS: dict[str, Any] = {"head_dim": 64, "num_heads": 4, "num_kv_heads": 2, "max_positions": 128, "num_layers": 2}
TAPS: dict[str, Any] = {"tap_layers": (0, 1), "num_target_layers": 2}
LIMITS = Limits(max_seq_len=64, max_batch=2, max_tree_budget=40, prefill_chunk=32)
ONE_SLOT = Limits(max_seq_len=64, max_batch=1, max_tree_budget=8, prefill_chunk=16)

Graph = tuple[Path, ModelProto]  # an ONNX file, and what is in it


class Graphs:
    """The graphs of one lowering in one precision, each in a folder of its own. Plugins are replaced by stand-ins."""

    def __init__(self, folder: Path, lowering: type[TensorRtGraph], floats: str, limits: Limits = LIMITS) -> None:
        self.folder, self.lowering, self.floats, self.limits = folder, lowering, floats, limits

    def target(self, target: Checkpoint, tap_layers: tuple[int, ...]) -> Graph:
        def make(g: TensorRtGraph) -> ModelProto:
            return build_target_graph(
                g,
                target.dims,
                target.tensor,
                tap_layers=tap_layers,
                limits=self.limits,
                tied=target.tie_word_embeddings,
                quantized=target,
            )

        return self.write("target", make)

    def drafter(self, drafter: Checkpoint, target: Checkpoint) -> Graph:
        return self.write("drafter", lambda g: drafter.kind.load("graph")(g, drafter, target, self.limits))

    def write(self, name: str, make: Callable[[TensorRtGraph], ModelProto], sink: Sink | None = None) -> Graph:
        folder = self.folder / f"{name}-graph"
        folder.mkdir()
        with WeightFile(folder / "weights.bin") as weights:
            model = without_plugins(make(self.lowering(name, sink or weights, self.floats)), self.floats)
        path = folder / f"{name}.onnx"
        path.write_bytes(model.SerializeToString())
        return path, model


def without_plugins(model: ModelProto, floats: str) -> ModelProto:
    """A copy whose plugin nodes are plain operators that read all inputs and give outputs of the right shapes."""
    copy = ModelProto()
    copy.CopyFrom(model)
    del copy.graph.node[:]
    for node in model.graph.node:
        copy.graph.node.extend(_stand_in(node, floats) if node.domain == plugins.NAMESPACE else [node])
    return copy


def _stand_in(node: NodeProto, floats: str) -> list[NodeProto]:
    q, k, v, past_k, past_v, *control = node.input
    attn, present_k, present_v = node.output
    nodes = []

    def op(kind: str, inputs: list[str], out: str, **attrs: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [out], name=out, **attrs))
        return out

    key, value = (op("ReduceMean", [x], f"{x}.mean.{attn}", keepdims=0) for x in (k, v))
    numbers = [
        op("ReduceMax", [op("Cast", [x], f"{x}.single.{attn}", to=TensorProto.FLOAT)], f"{x}.max.{attn}", keepdims=0)
        for x in control
    ]
    number = op("Cast", [op("Sum", numbers, f"{attn}.sum")], f"{attn}.number", to=TYPES[floats])
    op("Sum", [q, key, value, number], attn)
    op("Add", [past_k, key], present_k)
    op("Add", [past_v, value], present_v)
    return nodes
