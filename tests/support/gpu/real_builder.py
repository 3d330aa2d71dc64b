"""TensorRT's real parser and builder, those of TensorRT for RTX, which need no GPU, and networks that they compile.

The parser ends the process at a plugin that its product does not have: each is replaced by a stand-in.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper

from ddtree_trt import plugins
from ddtree_trt.artifact.manifest import AttentionName, Limits
from ddtree_trt.artifact.precisions import PrecisionName
from ddtree_trt.artifact.progress import no_progress
from ddtree_trt.build.backends.base import Inputs
from ddtree_trt.build.backends.tensorrt.plans import EngineBuilder, check_attention, networks, profile
from ddtree_trt.build.checkpoint.reader import Checkpoint
from ddtree_trt.build.graph.weights import WeightFile

LIMITS = Limits(max_seq_len=64, max_batch=2, max_tree_budget=40, prefill_chunk=32)
ONE_SLOT = Limits(max_seq_len=64, max_batch=1, max_tree_budget=8, prefill_chunk=16)


@cache
def rtx() -> Any:
    """The module, under the name it has where its meta-package is not installed. Skips the test without it."""
    return pytest.importorskip("tensorrt_rtx_bindings", reason="needs tensorrt-rtx-cu13-libs and its bindings")


@cache
def real_builder() -> EngineBuilder:
    """That of this process: TensorRT keeps the first log it gets."""
    return EngineBuilder(rtx(), "TensorRT", no_progress)


class Form(NamedTuple):
    """How a pair is compiled."""

    attention: AttentionName = "native"
    precision: PrecisionName = "bf16"
    limits: Limits = LIMITS


class Lowered:
    """One of a pair's networks, by its name in plans, as an ONNX file."""

    def __init__(self, folder: Path, target: Checkpoint, drafter: Checkpoint, name: str, form: Form) -> None:
        self.name, self.form, self.path = name, form, folder / f"{name}.onnx"
        inputs = Inputs(target, drafter, form.limits, form.precision)
        (self._network,) = (n for n in networks(inputs, form.attention) if n.name == name)
        with WeightFile(folder / "weights.bin") as weights:
            self.model = without_plugins(self._network.make(weights))
        self.path.write_bytes(self.model.SerializeToString())

    def parse(self) -> Any:
        """Its INetworkDefinition."""
        return real_builder()._parse(self.name, self.path)

    def compile(self) -> Any:
        """Its INetworkDefinition, after it became a plan. Raises BuildError."""
        parsed = []

        def finish(trt: Any, network: Any) -> None:
            parsed.append(network)
            if self.form.attention == "native":
                check_attention(trt, network, name=self.name, attention="native", graph=self.model)

        shapes = profile(self.model.graph.input, self._network.sizes)
        real_builder().build(self.name, self.path, self.path.with_suffix(".plan"), shapes, finish)
        return parsed[0]


def without_plugins(model: ModelProto) -> ModelProto:
    """A copy whose plugin nodes are plain operators that read all inputs and give outputs of the right shapes."""
    copy = ModelProto()
    copy.CopyFrom(model)
    del copy.graph.node[:]
    floats = {v.name: v.type.tensor_type.elem_type for v in model.graph.input}
    for node in model.graph.node:
        own = node.domain == plugins.NAMESPACE
        copy.graph.node.extend(_stand_in(node, floats[node.input[3]]) if own else [node])
    return copy


def _stand_in(node: NodeProto, floats: int) -> list[NodeProto]:
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
    number = op("Cast", [op("Sum", numbers, f"{attn}.sum")], f"{attn}.number", to=floats)
    op("Sum", [q, key, value, number], attn)
    op("Add", [past_k, key], present_k)
    op("Add", [past_v, value], present_v)
    return nodes
