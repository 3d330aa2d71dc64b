"""The graphs' vocabulary lowered to TensorRT: ONNX's own operators and one plugin, `DDTreeAttention`.

Networks are strongly typed: matrix products run in the engine's precision, long sums and rotary embedding in float32
between casts, which TensorRT fuses away. Ids, positions and row numbers are int32. The embedding and
the head are inputs, so that both engines read one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddtree_trt import plugins
from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.graph.ops import TYPES, Attention, Graph, Make, Sink, Table
from ddtree_trt.errors import BuildError
from ddtree_trt.models.experts import Experts
from ddtree_trt.plugins import MaskMode

# Most candidates per position. A tree of B nodes never looks past rank B, and beyond this rank a node is worth nothing;
# TensorRT's own limit is 3840.
MAX_CANDIDATES = 256


class TensorRtGraph(Graph):
    """`Graph` of operators that TensorRT's parser reads."""

    integers = "int32"
    domains = (plugins.NAMESPACE,)

    def __init__(self, name: str, sink: Sink, floats: str) -> None:
        """`floats` is the engine's precision: bfloat16 or float16 (float32 has no attention kernel)."""
        super().__init__(name, sink)
        self.floats = floats
        self._tables: set[str] = set()
        self._mask = ""
        self._max_tokens = 0

    def slots(self, limits: Limits) -> int:
        return limits.max_batch

    def table(self, table: Table) -> str:
        if table.name not in self._tables:
            self._tables.add(table.name)
            self.input(table.name, self.floats, table.shape)
        return table.name

    def row_inputs(self, tokens: str, max_tokens: int, *, masked: bool) -> None:
        self._max_tokens = max_tokens
        self.input(names.POSITIONS, "int32", ["N", tokens])
        self.input(names.SLOT_IDS, "int32", ["N"])
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
        self._cast(wide, "int32", names.CHOICES)
        self.output(names.CHOICES, self.integers, ["R"])

    def most_probable(self, logits: str, candidates: int, outputs: tuple[str, str]) -> int:
        """The K best logits less the logarithm of the sum: TensorRT's LogSoftmax would take the logarithm of
        probabilities rounded to 0, and TopK would sort a second array of V columns."""
        k = min(candidates, MAX_CANDIDATES)
        log_probs, token_ids = outputs
        count = self.constant(f"top.{k}", np.array([k], np.int64))
        best, wide = f"{log_probs}.logits", f"{token_ids}.wide"
        self.op("TopK", [logits, count], [best, wide], axis=-1, largest=1, sorted=1)
        self._cast(wide, "int32", token_ids)
        axis = self._axis(-1)
        top = self.op("ReduceMax", [logits, axis], [f"{logits}.max"], keepdims=1)
        weights = self.op("Exp", [self.op("Sub", [logits, top], [f"{logits}.shifted"])], [f"{logits}.weights"])
        total = self.op("Log", [self.op("ReduceSum", [weights, axis], [f"{logits}.sum"])], [f"{logits}.log_sum"])
        self.op("Sub", [self.op("Sub", [best, top], [f"{log_probs}.shifted"]), total], [log_probs])
        return k

    def rms_norm(self, x: str, weight: str, out: str, eps: float) -> str:
        single = self._single(x)
        square = self.op("Mul", [single, single], [f"{out}.square"])
        mean = self.op("ReduceMean", [square, self._axis(-1)], [f"{out}.mean"], keepdims=1)
        shifted = self.op("Add", [mean, self.constant(f"eps.{eps:g}", np.array(eps, np.float32))], [f"{out}.shifted"])
        scaled = self.op("Div", [single, self.op("Sqrt", [shifted], [f"{out}.root"])], [f"{out}.scaled"])
        return self._rounded("Mul", [scaled, weight], out)

    def add_rms_norm(self, x: str, residual: str, weight: str, out: str, eps: float) -> tuple[str, str]:
        total = self.op("Add", [x, residual], [f"{out}.sum"])
        return self.rms_norm(total, weight, out, eps), total

    def swiglu(self, gate: str, up: str, out: str) -> str:
        single = self._single(gate)
        silu = self.op("Mul", [single, self.op("Sigmoid", [single], [f"{out}.sigmoid"])], [f"{out}.silu"])
        return self._rounded("Mul", [silu, self._single(up)], out)

    def experts(self, x: str, logits: str, key: str, projections: tuple[Make, Make], experts: Experts, out: str) -> str:
        """Raises BuildError; `TensorRtBuild.check` refuses such networks before."""
        raise BuildError("mixtures of experts are not lowered to TensorRT; use --backend torch")

    def attention(self, qkv: tuple[str, str, str], at: Attention, out: str) -> str:
        return self._attention(qkv, at, MaskMode.TREE, self._mask, out)

    def block_attention(self, qkv: tuple[str, str, str], at: Attention, block: int, out: str) -> str:
        # The plugin requires a mask of rank 3 in every mode and reads it in mode TREE only.
        mask = self.reshape(names.SLOT_IDS, [-1, 1, 1], "no_mask")
        return self.rows_from(self._attention(qkv, at, MaskMode.NONE, mask, f"{out}.rows"), -block, out)

    def _attention(self, qkv: tuple[str, str, str], at: Attention, mode: MaskMode, mask: str, out: str) -> str:
        (query_heads, kv_heads), size = at.heads, at.head_dim
        query, key, value = (
            self.reshape(x, [0, 0, heads, size], f"{x}.by_head")
            for x, heads in zip(qkv, (query_heads, kv_heads, kv_heads), strict=True)
        )
        attrs = {
            plugins.NUM_Q_HEADS: query_heads,
            plugins.NUM_KV_HEADS: kv_heads,
            plugins.HEAD_DIM: size,
            plugins.MAX_TREE: self._max_tokens,
            plugins.SCALE: size**-0.5,
            plugins.MASK_MODE: int(mode),
            # By these TensorRT's parser finds the plugin.
            "plugin_namespace": plugins.NAMESPACE,
            "plugin_version": plugins.VERSION,
        }
        inputs = [self._rotate(query, at), self._rotate(key, at), value, *at.past, names.SLOT_IDS, names.PAST_LEN, mask]
        seen = f"{out}.by_head"
        self.op(plugins.ATTENTION, inputs, [seen, *at.present], domain=plugins.NAMESPACE, **attrs)
        return self.reshape(seen, [0, 0, query_heads * size], out)

    def _rotate(self, x: str, at: Attention) -> str:
        """Rotary embedding of x [N, T, heads, D]: the halves (a, b) of a head rotated by its position's angles."""
        single = self._single(x)
        half = at.head_dim // 2
        a, b = self.split(single, [half, half], [f"{x}.a", f"{x}.b"])
        cos, sin = (self._angles(table) for table in at.rotary)
        rotated = [
            self.op(
                kind, [self.op("Mul", [p, cos], [f"{p}.cos"]), self.op("Mul", [q, sin], [f"{q}.sin"])], [f"{p}.new"]
            )
            for kind, p, q in (("Sub", a, b), ("Add", b, a))
        ]
        return self._rounded("Concat", rotated, f"{x}.rotated", axis=-1)

    def _angles(self, table: str) -> str:
        """The rows of a rotary table that the positions name: [N, T, 1, D/2]."""
        rows = self.op("Gather", [table, names.POSITIONS], [f"{table}.rows"], axis=0)
        return self.op("Unsqueeze", [rows, self._axis(2)], [f"{table}.angles"])

    def _axis(self, axis: int) -> str:
        return self.constant(f"axis.{axis}", np.array([axis], np.int64))

    def _cast(self, x: str, dtype: str, out: str) -> str:
        return self.op("Cast", [x], [out], to=TYPES[dtype])

    def _single(self, x: str) -> str:
        """x in float32."""
        return self._cast(x, "float32", f"{x}.single")

    def _rounded(self, kind: str, inputs: Sequence[str], out: str, **attrs: Any) -> str:
        """The result, in the engine's precision, of a node over float32 values."""
        return self._cast(self.op(kind, inputs, [f"{out}.exact"], **attrs), self.floats, out)
