"""The EAGLE-3 drafter as a graph: tokens and the states before them in, states and the most probable tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ddtree_trt.artifact import tensors as names
from ddtree_trt.build.graph.drafter_network import own_head_table, rows_for_head, target_ids
from ddtree_trt.build.graph.networks import Network, embedding_table, head_table
from ddtree_trt.build.graph.ops import Graph, Table
from ddtree_trt.build.graph.rotation import Weights, rotate
from ddtree_trt.models.drafters import eagle3
from ddtree_trt.models.drafters.dflash import TO_TARGET
from ddtree_trt.models.drafters.eagle3 import Eagle3Dims

if TYPE_CHECKING:
    from onnx import ModelProto

    from ddtree_trt.artifact.manifest import Limits


def build_eagle_graph(
    g: Graph,
    dims: Eagle3Dims,
    weights: Weights,
    *,
    target_weights: Weights,
    target_tied: bool,
    limits: Limits,
) -> ModelProto:
    """T tokens of N slots behind their caches, under a tree's mask → the outputs of R rows and their top-K tokens.

    A row is made of its token and of the state before it. The states of the first C rows are tapped target states,
    which `fc` fuses; those of the other D = T − C rows are outputs of earlier passes. Either number may be 0. The top-K
    ids are the target's.
    """
    token_ids = g.input(names.TOKEN_IDS, g.integers, ["N", "T"])
    taps = g.input(names.TAPS, g.floats, ["N", "C", dims.taps_width])
    features = g.input(names.FEATURES, g.floats, ["N", "D", dims.hidden_size])
    rows = g.input(names.ROWS, g.integers, ["R"])
    g.row_inputs("T", limits.max_tokens_per_pass, masked=True)
    net = Network(g, dims, weights, limits, names.DRAFTER, eagle3.BODY)

    def fc() -> np.ndarray:
        weight = net.weights(eagle3.FC)
        size = dims.target_hidden_size or dims.hidden_size
        return np.ascontiguousarray((rotate(weight, size) if g.rotates else weight).T)

    # Never rounded: all that the drafter knows of the context passes through this product.
    fused = g.product(taps, g.weight(f"{net.prefix}fc", fc), "fc.out")
    x = g.concat([fused, features], "states", axis=1)
    eps = dims.rms_norm_eps
    state = g.rms_norm(x, net.norm(eagle3.state_norm(dims)), "state", eps)
    embedded = g.embed(_embedding(dims, weights, target_weights), token_ids, "embedded")
    token = g.rms_norm(embedded, net.norm(net.layers[0].input_norm), "token", eps)
    both = g.concat([token, state], "layers.0.input", axis=-1)
    attn = g.attention(net.qkv(0, both), net.cached(0), f"{net.name(0)}.attn")
    h, x = net.after_attention(0, net.project(0, attn), state if dims.norm_before_residual else x)

    def wanted(values: str, out: str) -> str:
        flat = g.reshape(values, [-1, dims.hidden_size], f"{out}.flat")
        return g.op("Gather", [flat, rows], [out], axis=0)

    normed = wanted(h, "normed")
    if dims.norm_output:
        g.op("Identity", [normed], [names.OUTPUTS])
    else:
        wanted(x, names.OUTPUTS)
    g.output(names.OUTPUTS, g.floats, ["R", dims.hidden_size])
    head = own_head_table(g, dims, weights) if dims.own_head else head_table(g, dims, target_weights, "", target_tied)
    _add_candidates(g, dims, weights, g.head(rows_for_head(g, normed, dims.hidden_size), head, names.LOGITS), limits)
    return g.model()


def _embedding(dims: Eagle3Dims, weights: Weights, target_weights: Weights) -> Table:
    """Its own embedding, or the target's."""
    if not dims.own_embedding:
        return embedding_table(dims, target_weights, "")
    key = f"{names.DRAFTER}{eagle3.EMBEDDING}"
    return Table(names.EMBEDDING, key, lambda: weights(eagle3.EMBEDDING), dims.table)


def _add_candidates(g: Graph, dims: Eagle3Dims, weights: Weights, logits: str, limits: Limits) -> None:
    """The outputs `log_probs` and `candidates` [R, K] of logits [R, V']."""
    most = min(max(limits.max_tree_budget, 1), dims.head_size)
    if dims.draft_vocab_size is None:
        k = g.most_probable(logits, most, (names.LOG_PROBS, names.CANDIDATES))
    else:
        k = g.most_probable(logits, most, (names.LOG_PROBS, "draft_ids"))
        key = f"{names.DRAFTER}to_target"
        ids = g.weight(key, lambda: target_ids(weights(TO_TARGET), g.integers), g.integers)
        g.op("Gather", [ids, "draft_ids"], [names.CANDIDATES], axis=0)
    g.output(names.LOG_PROBS, "float32", ["R", k])
    g.output(names.CANDIDATES, g.integers, ["R", k])
