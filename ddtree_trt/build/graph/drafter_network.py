"""The DFlash drafter as an ONNX graph.

Its steps follow each other in `build_drafter_graph`: context rows from tapped states, the layers over one block, and
the candidates of the rows that predict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.graph.heads import Convolutions, PairFactors
from ddtree_trt.build.graph.networks import Network, embedding_table, head_table
from ddtree_trt.build.graph.ops import Graph, Table
from ddtree_trt.build.graph.rotation import Weights, rotate, rotation_matrix
from ddtree_trt.models.drafters import dflash
from ddtree_trt.models.drafters.dflash import DrafterDims
from ddtree_trt.models.drafters.eagle3 import Eagle3Dims
from ddtree_trt.models.drafters.heads import ATTENTION

PREFIX = "drafter."  # of its weights in the graph
_DRAFT_IDS = "draft_ids"  # ids of a vocabulary of the drafter's own


@dataclass(frozen=True)
class Tables:
    """The embedding and the head of a drafter: its own, or the target's."""

    embedding: Table
    head: Table  # of rotated rows in a graph that rotates


def build_drafter_graph(
    g: Graph,
    dims: DrafterDims,
    weights: Weights,
    *,
    target_weights: Weights,
    target_tied: bool,
    limits: Limits,
) -> ModelProto:
    """The DFlash drafter: C new context rows and one block [bonus, MASK, …] → top-K log-probabilities and the target's
    ids of L positions.

    Context rows are the tapped target states of committed tokens, projected by `fc` and normed; every layer appends
    their keys and values, then the block's, and the block attends to those that the layer's `Sight` allows. The next
    call starts at the end of the context and overwrites the block's rows. The context rows pass through the fused
    projection with the block, which costs their queries and saves a second matrix product per layer; those outputs are
    dropped.
    """
    block, eps = dims.block_size, dims.rms_norm_eps
    taps = g.states(names.TAPS, ["N", "C", dims.taps_width])
    token_ids = g.input(names.TOKEN_IDS, g.integers, ["N", block])
    g.row_inputs("C+block", max(limits.prefill_chunk, block) + block, masked=False)
    net = _DrafterNetwork(g, dims, weights, limits, PREFIX, dflash.BODY)
    tables = _tables(g, dims, weights, target_weights, target_tied)

    context = _context(net, dims, taps)
    x = g.scaled(g.embed(tables.embedding, token_ids, "embedded"), dims.embedding_scale)
    h = g.rms_norm(x, net.norm(net.layers[0].input_norm), "layers.0.input", eps)
    for i in range(dims.num_layers):

        def attention(rows: str, i: int = i) -> str:
            layer = net.name(i)
            rows = g.concat([context, rows], f"{layer}.rows", axis=1)
            seen = g.block_attention(net.qkv(i, rows), net.cached(i), block, dims.sight(i), f"{layer}.attn")
            return net.project(i, seen)

        h, x = net.after_attention(i, net.around(i, ATTENTION, h, attention), x)
    drafting = h if dims.anchor_first else g.rows_from(h, 1, "masks")
    logits = _logits(g, dims, drafting, tables.head)
    if dims.pair_head is None:
        _marginals(net, dims, logits, min(max(limits.max_tree_budget, 1), dims.head_size))
    else:
        _pairs(net, dims, PairFactors(g, dims.pair_head, weights, PREFIX), drafting, token_ids, logits)
    return g.model()


class _DrafterNetwork(Network):
    """A block drafter's network: a convolution may stand around each sublayer."""

    def __init__(
        self, graph: Graph, dims: DrafterDims, weights: Weights, limits: Limits, prefix: str, body: str
    ) -> None:
        super().__init__(graph, dims, weights, limits, prefix, body)
        self._convolutions = Convolutions(graph, dims, weights, prefix)

    def around(self, index: int, place: str, h: str, sublayer: Callable[[str], str]) -> str:
        return self._convolutions.around(index, place, h, sublayer)


def _tables(g: Graph, dims: DrafterDims, weights: Weights, target_weights: Weights, target_tied: bool) -> Tables:
    embedding, head = embedding_table(dims, target_weights, ""), head_table(g, dims, target_weights, "", target_tied)
    if dims.own_embedding:
        key = PREFIX + dflash.OWN_EMBEDDING
        embedding = Table(names.EMBEDDING, key, lambda: weights(dflash.OWN_EMBEDDING), dims.table)
    if dims.own_head:
        head = own_head_table(g, dims, weights)
    return Tables(embedding, head)


def own_head_table(g: Graph, dims: DrafterDims | Eagle3Dims, weights: Weights) -> Table:
    """A drafter's own head [V', H]; for rotated rows in a graph that rotates."""

    def own_head() -> np.ndarray:
        weight = weights(dflash.OWN_HEAD)
        return rotate(weight, dims.hidden_size) if g.rotates else weight

    return Table(names.HEAD, PREFIX + dflash.OWN_HEAD, own_head, (dims.head_size, dims.hidden_size))


def rows_for_head(g: Graph, rows: str, size: int) -> str:
    """Normed rows [R, H] as a drafter's head takes them: rotated in a graph that rotates."""
    if not g.rotates:
        return rows
    return g.product(rows, g.weight("rotation.into", lambda: rotation_matrix(size)), "hidden.head")


def _context(net: Network, dims: DrafterDims, taps: str) -> str:
    """Context rows [N, C, H] of tapped states [N, C, M·H]. The product is never rounded: all that the drafter knows of
    the context passes through it."""
    g = net.g

    def fc() -> np.ndarray:
        weight = net.weights(*dflash.fc(dims).sources)
        return np.ascontiguousarray((rotate(weight, dims.hidden_size) if g.rotates else weight).T)

    projected = g.product(taps, g.weight(f"{net.prefix}fc", fc), "fc.out")
    return g.rms_norm(projected, net.norm(dflash.context_norm(dims)), "context", dims.rms_norm_eps)


def _logits(g: Graph, dims: DrafterDims, rows: str, head: Table) -> str:
    """Logits [N, L, V'] of normed rows [N, L, H]."""
    flat = rows_for_head(g, g.reshape(rows, [-1, dims.hidden_size], "hidden"), dims.hidden_size)
    logits = g.head(flat, head, "flat_logits")
    return g.reshape(logits, [-1, dims.draft_length, dims.head_size], "logits")


def _marginals(net: Network, dims: DrafterDims, logits: str, candidates: int) -> None:
    """Add the outputs of logits [N, L, V']: log-probabilities and the target's ids of the most probable, at most
    `candidates`."""
    g = net.g
    logits = g.capped(logits, dims.logit_scale, dims.logit_cap)
    mapped = dims.draft_vocab_size is not None
    k = g.most_probable(logits, candidates, (names.LOG_PROBS, _DRAFT_IDS if mapped else names.CANDIDATES))
    if mapped:
        _map_ids(net)
    g.output(names.LOG_PROBS, "float32", ["N", dims.draft_length, k])
    g.output(names.CANDIDATES, g.integers, ["N", dims.draft_length, k])


def _pairs(net: Network, dims: DrafterDims, factors: PairFactors, hidden: str, token_ids: str, logits: str) -> None:
    """Add the outputs of logits [N, L, V']: the C largest and the target's ids of them, and the factors of pairs."""
    g, count = net.g, factors.candidates
    wanted = g.constant(f"top.{count}", np.array([count], np.int64))
    g.op("TopK", [logits, wanted], ["best_logits", f"{_DRAFT_IDS}.wide"], axis=-1, largest=1, sorted=1)
    draft_ids = candidates = names.CANDIDATES
    if dims.draft_vocab_size is not None:
        draft_ids = _DRAFT_IDS
    g.cast(f"{_DRAFT_IDS}.wide", g.integers, draft_ids)
    if dims.draft_vocab_size is not None:
        _map_ids(net)
    g.op("Identity", [g.capped("best_logits", dims.logit_scale, dims.logit_cap)], [names.UNARY])
    g.output(names.UNARY, "float32", ["N", dims.draft_length, count])
    g.output(names.CANDIDATES, g.integers, ["N", dims.draft_length, count])
    factors.add(hidden, token_ids, candidates, draft_ids, dims.draft_length)


def _map_ids(net: Network) -> None:
    """Compute the target's ids of the draft ids."""
    g = net.g
    ids = g.weight(f"{net.prefix}to_target", lambda: target_ids(net.weights(dflash.TO_TARGET), g.integers), g.integers)
    g.op("Gather", [ids, _DRAFT_IDS], [names.CANDIDATES], axis=0)


def target_ids(offsets: np.ndarray, dtype: str) -> np.ndarray:
    """The target's id of each draft id [V'], from the checkpoint's offsets between the two."""
    return (np.arange(len(offsets)) + np.rint(offsets).astype(np.int64)).astype(dtype)
