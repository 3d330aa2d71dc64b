"""The graph of an autoregressive drafter: the target's, without taps."""

from onnx import ModelProto

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.checkpoint.reader import Checkpoint
from ddtree_trt.build.graph.networks import build_target_graph
from ddtree_trt.build.graph.ops import Graph


def build(g: Graph, drafter: Checkpoint, target: Checkpoint, limits: Limits) -> ModelProto:
    """T tokens of N slots after their caches → logits of R rows."""
    return build_target_graph(g, drafter, limits, prefix=names.DRAFTER)
