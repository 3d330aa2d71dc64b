"""The common part of the graphs of drafters that are conditioned on tapped target states."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.checkpoint.reader import Checkpoint
from ddtree_trt.build.graph.networks import Network, embedding_table, head_table
from ddtree_trt.build.graph.ops import Graph, Table
from ddtree_trt.build.graph.rotation import rotate, rotation_matrix
from ddtree_trt.drafters.tapped import BODY, FC, OWN_EMBEDDING, OWN_HEAD, TO_TARGET

DRAFT_IDS = "draft_ids"  # ids of a vocabulary of the drafter's own


class TappedNetwork(Network):
    """Layers, tables and fusion of a drafter, whose tables may be its target's."""

    dims: Any

    def __init__(self, g: Graph, drafter: Checkpoint, target: Checkpoint, limits: Limits) -> None:
        super().__init__(g, drafter.dims, drafter.tensor, limits, names.DRAFTER, BODY)
        self._target = target

    def embedding(self) -> Table:
        """Its own embedding, or the target's."""
        if not self.dims.own_embedding:
            return embedding_table(self.dims, self._target.tensor, "")
        key = self.prefix + OWN_EMBEDDING
        return Table(names.EMBEDDING, key, lambda: self.weights(OWN_EMBEDDING), self.dims.table)

    def fused(self, taps: str) -> str:
        """Tapped states [N, C, M·H] in the drafter's width. The product is never rounded: all that the drafter knows
        of the context passes through it."""

        def fc() -> np.ndarray:
            weight = self.weights(FC)
            size = self.dims.taps_width // len(self.dims.tap_layers)
            return np.ascontiguousarray((rotate(weight, size) if self.g.rotates else weight).T)

        return self.g.product(taps, self.g.weight(f"{self.prefix}fc", fc), "fc.out")

    def logits(self, rows: str, out: str) -> str:
        """Logits [R, V'] of normed rows [R, H]: by its own head, or the target's."""
        g, dims, target = self.g, self.dims, self._target
        if not dims.own_head:
            head = head_table(g, dims, target.tensor, "", target.tie_word_embeddings)
        else:

            def own() -> np.ndarray:
                weight = self.weights(OWN_HEAD)
                return rotate(weight, dims.hidden_size) if g.rotates else weight

            head = Table(names.HEAD, self.prefix + OWN_HEAD, own, (dims.head_size, dims.hidden_size))
        if g.rotates:
            into = g.weight("rotation.into", lambda: rotation_matrix(dims.hidden_size))
            rows = g.product(rows, into, "hidden.head")
        return g.head(rows, head, out)

    @property
    def ids(self) -> str:
        """The name of the head's ids, which are the target's unless `add_target_ids` maps them."""
        return names.CANDIDATES if self.dims.draft_vocab_size is None else DRAFT_IDS

    def add_target_ids(self) -> None:
        """Compute the target's ids of the head's ids, where they differ."""
        if self.dims.draft_vocab_size is None:
            return
        g = self.g

        def target_ids() -> np.ndarray:
            offsets = np.rint(self.weights(TO_TARGET)).astype(np.int64)
            return (np.arange(len(offsets)) + offsets).astype(g.integers)

        ids = g.weight(f"{self.prefix}to_target", target_ids, g.integers)
        g.op("Gather", [ids, DRAFT_IDS], [names.CANDIDATES], axis=0)

    def add_most_probable(self, logits: str, limits: Limits, *shape: int | str) -> None:
        """Add the outputs `log_probs` and `candidates` [..., K] of logits [..., V'], of these first dimensions."""
        g = self.g
        most = min(max(limits.max_tree_budget, 1), self.dims.head_size)
        k = g.most_probable(logits, most, (names.LOG_PROBS, self.ids))
        self.add_target_ids()
        g.output(names.LOG_PROBS, "float32", [*shape, k])
        g.output(names.CANDIDATES, g.integers, [*shape, k])
