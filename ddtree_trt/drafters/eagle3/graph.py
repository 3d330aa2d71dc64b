"""The EAGLE-3 drafter as a graph: tokens and the states before them in, states and the most probable tokens out."""

from onnx import ModelProto

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.checkpoint.reader import Checkpoint
from ddtree_trt.build.graph.networks import TappedNetwork
from ddtree_trt.build.graph.ops import Graph
from ddtree_trt.drafters.eagle3.dims import Eagle3Dims, state_norm


def build(g: Graph, drafter: Checkpoint, target: Checkpoint, limits: Limits) -> ModelProto:
    """T tokens of N slots after their caches, under a tree's mask → the outputs of R rows and their top-K tokens.

    A row is made of its token and of the state before it. The states of the first C rows are tapped target states,
    which `fc` fuses; those of the other D = T − C rows are outputs of earlier passes. Either number may be 0. The top-K
    ids are the target's.
    """
    dims: Eagle3Dims = drafter.kind.dims
    token_ids = g.input(names.TOKEN_IDS, g.integers, ["N", "T"])
    taps = g.input(names.TAPS, g.floats, ["N", "C", dims.taps_width])
    features = g.input(names.FEATURES, g.floats, ["N", "D", dims.hidden_size])
    rows = g.input(names.ROWS, g.integers, ["R"])
    g.row_inputs("T", limits.max_tokens_per_pass, masked=True)
    net = TappedNetwork(g, drafter, target, limits)
    eps = dims.rms_norm_eps

    x = g.concat([net.fused(taps), features], "states", axis=1)
    state = g.rms_norm(x, net.norm(state_norm(dims)), "state", eps)
    embedded = g.embed(net.embedding(), token_ids, "embedded")
    token = g.rms_norm(embedded, net.norm(net.layers[0].input_norm), "token", eps)
    both = g.concat([token, state], "layers.0.input", axis=-1)
    seen = g.attention(net.qkv(0, both), net.cached(0), f"{net.name(0)}.attn")
    h, x = net.after_attention(0, net.project(0, seen), state if dims.norm_before_residual else x)

    def wanted(values: str, out: str) -> str:
        flat = g.reshape(values, [-1, dims.hidden_size], f"{out}.flat")
        return g.op("Gather", [flat, rows], [out], axis=0)

    normed = wanted(h, "normed")
    if dims.norm_output:
        g.op("Identity", [normed], [names.OUTPUTS])
    else:
        wanted(x, names.OUTPUTS)
    g.output(names.OUTPUTS, g.floats, ["R", dims.hidden_size])
    net.add_most_probable(net.logits(normed, names.LOGITS), "R")
    return g.model()
