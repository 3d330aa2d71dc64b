"""The common part of the two TensorRT lowerings, which differ in attention: `PluginGraph` and `NativeGraph`.

Networks are strongly typed: matrix products run in the engine's precision, long sums and rotary embedding in float32
between casts, which TensorRT fuses away. Ids, positions and row numbers are int32. The embedding and
the head are inputs, so that both engines read one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddtree_trt.artifact import tensors as names
from ddtree_trt.build.graph.ops import Graph, Make, Shape, Sink, Table
from ddtree_trt.errors import BuildError
from ddtree_trt.models.experts import Experts

# Most candidates per position. A tree of B nodes never looks past rank B, and beyond this rank a node is worth nothing;
# TensorRT's own limit is 3840.
MAX_CANDIDATES = 256


class TensorRtGraph(Graph):
    """`Graph` of operators that TensorRT's parser reads. The lowering of attention is a subclass's."""

    integers = "int32"

    def __init__(self, name: str, sink: Sink, floats: str, shared: str | None = None) -> None:
        """`floats` is the network's precision: bfloat16 or float16 (float32 has no attention kernel); `shared` that of
        embeddings and tapped states, by default the same."""
        super().__init__(name, sink)
        self.floats = floats
        self.shared = shared or floats
        self._tables: set[str] = set()
        self._mask = ""

    def table(self, table: Table) -> str:
        if table.name not in self._tables:
            self._tables.add(table.name)
            self.input(table.name, self.shared, table.shape)
        return table.name

    def embed(self, table: Table, token_ids: str, out: str) -> str:
        if self.shared == self.floats:
            return super().embed(table, token_ids, out)
        return self.cast(super().embed(table, token_ids, f"{out}.shared"), self.floats, out)

    def states(self, name: str, shape: Shape) -> str:
        if self.shared == self.floats:
            return super().states(name, shape)
        return self.cast(self.input(name, self.shared, shape), self.floats, f"{name}.own")

    def row_inputs(self, tokens: str, max_tokens: int, *, masked: bool) -> None:
        self.input(names.POSITIONS, "int32", ["N", tokens])
        self.input(names.PAST_LEN, "int32", ["N"])
        if masked:
            self._mask = self.input(names.TREE_MASK, "int32", ["N", tokens, -(-max_tokens // 32)])

    def head(self, x: str, table: Table, out: str) -> str:
        """A product of float32, also where the rest is in halves: a strongly typed product of halves gives halves, in
        which large logits of different tokens are equal. The table comes in float32, an input of its own even where
        the head is the embedding: a cast in the graph would write it anew in every pass."""
        if names.HEAD not in self._tables:
            self._tables.add(names.HEAD)
            self.input(names.HEAD, "float32", table.shape)
        return self.op("Gemm", [self._single(x), names.HEAD], [out], transB=1)

    def choices(self, logits: str) -> None:
        wide = self.op("ArgMax", [logits], [f"{names.CHOICES}.wide"], axis=1, keepdims=0)
        self.cast(wide, "int32", names.CHOICES)
        self.output(names.CHOICES, self.integers, ["R"])

    def most_probable(self, logits: str, candidates: int, outputs: tuple[str, str]) -> int:
        """The K best logits less the logarithm of the sum: TensorRT's LogSoftmax would take the logarithm of
        probabilities rounded to 0, and TopK would sort a second array of V columns."""
        k = min(candidates, MAX_CANDIDATES)
        log_probs, token_ids = outputs
        count = self.constant(f"top.{k}", np.array([k], np.int64))
        best, wide = f"{log_probs}.logits", f"{token_ids}.wide"
        self.op("TopK", [logits, count], [best, wide], axis=-1, largest=1, sorted=1)
        self.cast(wide, "int32", token_ids)
        axis = self._axis(-1)
        top = self.op("ReduceMax", [logits, axis], [f"{logits}.max"], keepdims=1)
        weights = self.op("Exp", [self.op("Sub", [logits, top], [f"{logits}.shifted"])], [f"{logits}.weights"])
        total = self.op("Log", [self.op("ReduceSum", [weights, axis], [f"{logits}.sum"])], [f"{logits}.log_sum"])
        self.op("Sub", [self.op("Sub", [best, top], [f"{log_probs}.shifted"]), total], [log_probs])
        return k

    def add_rms_norm(self, x: str, residual: str, weight: str, out: str, eps: float) -> tuple[str, str]:
        total = self.op("Add", [x, residual], [f"{out}.sum"])
        return self.rms_norm(total, weight, out, eps), total

    def experts(self, x: str, logits: str, key: str, projections: tuple[Make, Make], experts: Experts, out: str) -> str:
        """Raises BuildError; the backends' `check` refuses such networks before."""
        raise BuildError("mixtures of experts are not lowered to TensorRT; use --backend torch")

    def _angles(self, table: str, positions: str = names.POSITIONS) -> str:
        """The rows of a rotary table [S, D/2] that positions [N, T] name: [N, T, D/2]."""
        return self.op("Gather", [table, positions], [f"{table}.{positions}"], axis=0)

    def _axis(self, axis: int) -> str:
        return self.constant(f"axis.{axis}", np.array([axis], np.int64))

    def _single(self, x: str) -> str:
        """x in float32."""
        return self.cast(x, "float32", f"{x}.single")

    def _rounded(self, kind: str, inputs: Sequence[str], out: str, **attrs: Any) -> str:
        """The result, in the engine's precision, of a node over float32 values."""
        return self.cast(self.op(kind, inputs, [f"{out}.exact"], **attrs), self.floats, out)
