"""TensorRT's real parser and builder, those of TensorRT for RTX, which need no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto

from ddtree_trt.build.backends.tensorrt.plan import mend_attentions, unfused_attention
from ddtree_trt.build.backends.tensorrt.plans import Range, profile
from ddtree_trt.build.graph.lowering_tensorrt import ATTENTION
from ddtree_trt.device.libraries import make_log

Sizes = Mapping[str, Range]  # dimension → range


@cache
def rtx() -> Any:
    """The module, under the name it has where its meta-package is not installed. Skips the test without it."""
    return pytest.importorskip("tensorrt_rtx_bindings", reason="needs tensorrt-rtx-cu13-libs and its bindings")


@cache
def real_log() -> Any:
    """The log of this process: TensorRT keeps the first one it gets."""
    return make_log(rtx())


class RealBuilder:
    """Parses graphs and compiles them into plans."""

    def __init__(self) -> None:
        self.trt, self.log = rtx(), real_log()
        self._builder = self.trt.Builder(self.log)

    def parse(self, path: Path) -> Any:
        """The INetworkDefinition of an ONNX file. Raises AssertionError with the parser's reasons."""
        self.log.clear()
        network = self._builder.create_network(0)
        parser = self.trt.OnnxParser(network, self.log)
        parsed = parser.parse_from_file(str(path))
        assert parsed, [f"{e.node_name()}: {e.desc()}" for e in map(parser.get_error, range(parser.num_errors))]
        return network

    def build(self, path: Path, model: ModelProto, sizes: Sizes) -> Any:
        """The network, after it became a plan for these sizes. Attentions are mended."""
        network = self.parse(path)
        attentions = [node.output[0] for node in model.graph.node if node.op_type == ATTENTION]
        if attentions:
            mend_attentions(self.trt, network, path.stem, attentions)
        self.compile(network, model, sizes)
        return network

    def compile(self, network: Any, model: ModelProto, sizes: Sizes) -> bytes:
        """The plan. Raises AssertionError with the builder's reasons."""
        config = self._builder.create_builder_config()
        config.max_aux_streams = 0
        config.set_flag(self.trt.BuilderFlag.TF32)
        if shapes := profile(model.graph.input, sizes):
            made = self._builder.create_optimization_profile()
            for tensor, (smallest, tuned, largest) in shapes.items():
                made.set_shape(tensor, smallest, tuned, largest)
            assert config.add_optimization_profile(made) >= 0, self.log.words()
        plan = self._builder.build_serialized_network(network, config)
        words = self.log.words()
        assert plan is not None, f"{unfused_attention(self.trt, network, words)} {words}"
        return bytes(plan)
