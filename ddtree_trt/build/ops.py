"""The operator vocabulary of the graphs, lowered to ONNX Runtime.

`graph.py` speaks in these verbs only; another runtime is another lowering of the same verbs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

OPSET = 21
IR_VERSION = 10
MICROSOFT = "com.microsoft"
_TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "int32": TensorProto.INT32}

Shape = Sequence[int | str]


class Sink(Protocol):
    """Where weights go: stores an array once under its key and returns the initialiser that refers to it."""

    def add(self, key: str, make: Callable[[], np.ndarray]) -> TensorProto: ...


@dataclass(frozen=True)
class Attention:
    """What an attention reads beside its rows: one layer's cache, and where the T rows of the call go in it."""

    past: tuple[str, str]  # keys, values: float32 [N, Hkv, S, D]
    present: tuple[str, str]  # the same buffers, as outputs
    seqlens: str  # int32 [N]: past + T − 1
    total: str  # int32 []: W
    positions: str  # int64 [N, T]
    rotary: tuple[str, str]  # cosine, sine: float32 [S, D/2]
    heads: tuple[int, int]  # Hq, Hkv


class Graph:
    """Collects nodes, inputs, outputs and initialisers of one ONNX graph."""

    def __init__(self, name: str, sink: Sink, *, always_causal: bool = False) -> None:
        """`always_causal` is for versions of the attention kernel that know nothing else; see `block_attention`."""
        self.name = name
        self._sink = sink
        self._always_causal = always_causal
        self._nodes: dict[str, NodeProto] = {}
        self._inputs: list[ValueInfoProto] = []
        self._outputs: list[ValueInfoProto] = []
        self._initializers: dict[str, TensorProto] = {}

    # Edges of the graph

    def input(self, name: str, dtype: str, shape: Shape) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, _TYPES[dtype], list(shape)))
        return name

    def output(self, name: str, dtype: str, shape: Shape) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, _TYPES[dtype], list(shape)))

    def weight(self, key: str, make: Callable[[], np.ndarray]) -> str:
        """A weight in the external file; `make` runs only when the key is new to the file."""
        if key not in self._initializers:
            self._initializers[key] = self._sink.add(key, make)
        return key

    def constant(self, name: str, value: np.ndarray) -> str:
        """A small array kept inside the graph."""
        if name not in self._initializers:
            self._initializers[name] = numpy_helper.from_array(value, name)
        return name

    # Verbs

    def op(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attrs: Any) -> str:
        """Add one node, once however often it is asked for, and return the name of its first output.

        An empty name is an absent optional input.
        """
        node = helper.make_node(kind, list(inputs), list(outputs), outputs[0], domain=domain, **attrs)
        assert self._nodes.setdefault(outputs[0], node) == node, f"two nodes write {outputs[0]}"
        return outputs[0]

    def embed(self, table: str, token_ids: str, out: str) -> str:
        return self.op("Gather", [table, token_ids], [out], axis=0)

    def linear(self, x: str, weight: str, out: str) -> str:
        """x [..., in] times weight [in, out]."""
        return self.op("MatMul", [x, weight], [out])

    def head(self, x: str, weight: str, out: str) -> str:
        """x [R, H] times the transpose of weight [V, H], the layout the embedding has, so that both can share it."""
        return self.op("Gemm", [x, weight], [out], transB=1)

    def rms_norm(self, x: str, weight: str, out: str, eps: float) -> str:
        return self.op("SimplifiedLayerNormalization", [x, weight], [out], axis=-1, epsilon=eps)

    def add_rms_norm(self, x: str, residual: str, weight: str, out: str, eps: float) -> tuple[str, str]:
        """Returns (rms_norm(x + residual), x + residual)."""
        total = f"{out}.sum"
        outputs = [out, "", "", total]
        node = "SkipSimplifiedLayerNormalization"
        self.op(node, [x, residual, weight], outputs, domain=MICROSOFT, epsilon=eps)
        return out, total

    def split(self, x: str, sizes: Sequence[int], outputs: Sequence[str]) -> Sequence[str]:
        key = "sizes." + "_".join(map(str, sizes))
        self.op("Split", [x, self.constant(key, np.array(sizes, np.int64))], outputs, axis=-1)
        return outputs

    def reshape(self, x: str, shape: Sequence[int], out: str) -> str:
        key = "shape." + "_".join(map(str, shape))
        return self.op("Reshape", [x, self.constant(key, np.array(shape, np.int64))], [out])

    def concat(self, parts: Sequence[str], out: str, *, axis: int) -> str:
        return self.op("Concat", parts, [out], axis=axis)

    def rows_from(self, x: str, start: int, out: str) -> str:
        """x[:, start:] along the token axis; a negative start counts from the end."""
        bounds = [("start", start), ("end", np.iinfo(np.int64).max), ("axis", 1)]
        names = [self.constant(f"{n}.{v}", np.array([v], np.int64)) for n, v in bounds]
        return self.op("Slice", [x, *names], [out])

    def swiglu(self, gate: str, up: str, out: str) -> str:
        """silu(gate) · up. QuickGelu with alpha 1 is silu in one pass."""
        silu = self.op("QuickGelu", [gate], [f"{out}.silu"], domain=MICROSOFT, alpha=1.0)
        return self.op("Mul", [silu, up], [out])

    def attention(self, qkv: tuple[str, str, str], at: Attention, bias: str, out: str) -> str:
        """Grouped-query attention that appends to the cache in place: a row sees the past and the rows up to itself,
        less what `bias` [N, 1, T, W] hides.

        qkv are [N, T, heads · D], after the head norms and before rotary embedding.
        """
        return self._attention(qkv, at, bias, out)

    def block_attention(self, qkv: tuple[str, str, str], at: Attention, block: int, out: str) -> str:
        """As `attention`, but each of the last `block` rows sees all rows. Returns what these get: [N, block, Hq · D].

        Where the kernel is always causal the block comes twice: the second copy stands behind the first and sees all of
        it, and its own keys are hidden from it. They take `block` more rows of the cache.
        """
        if self._always_causal:
            rows = self._attention(*self._twice(qkv, at, block), f"{out}.rows")
        else:
            rows = self._attention(qkv, at, "", f"{out}.rows", causal=0)
        return self.rows_from(rows, -block, out)

    def _attention(self, qkv: tuple[str, str, str], at: Attention, bias: str, out: str, **attrs: int) -> str:
        inputs = [*qkv, *at.past, at.seqlens, at.total, *at.rotary, at.positions, bias]
        attrs |= {"num_heads": at.heads[0], "kv_num_heads": at.heads[1], "do_rotary": int(at.positions != "")}
        return self.op("GroupQueryAttention", inputs, [out, *at.present], domain=MICROSOFT, **attrs)

    def _twice(
        self, qkv: tuple[str, str, str], at: Attention, block: int
    ) -> tuple[tuple[str, str, str], Attention, str]:
        """qkv with the last `block` rows repeated, lengths to match, and the bias [1, 1, T, W] that hides the copy."""
        query, key, value = qkv
        # The kernel's own rotary embedding lets positions only rise in a first pass.
        query, key = (
            self.op("RotaryEmbedding", [x, at.positions, *at.rotary], [f"{x}.turned"], domain=MICROSOFT)
            for x in (query, key)
        )
        query, key, value = (
            self.concat([x, self.rows_from(x, -block, f"{x}.block")], f"{x}.twice", axis=1) for x in (query, key, value)
        )
        size = self.constant(f"block.{block}", np.array(block, np.int32))
        seqlens = self.op("Add", [at.seqlens, size], [f"{at.seqlens}.twice"])
        total = self.op("Add", [at.total, size], [f"{at.total}.twice"])
        # Nothing is hidden but the square of the copy's rows and keys, at the end of both axes.
        hidden = np.full((1, 1, block, block), np.finfo(np.float32).min, np.float32)
        before = self.op("Shape", [at.positions], ["rows.before"], start=1)
        columns = self.op("Cast", [at.total], ["columns.before"], to=TensorProto.INT64)
        columns = self.reshape(columns, [1], "columns.before.1d")
        none = self.constant("zeros", np.zeros(2, np.int64))
        pads = self.concat([none, before, columns, none, none], "hidden.pads", axis=0)
        bias = self.op("Pad", [self.constant(f"hidden.{block}", hidden), pads], ["hidden.bias"])
        return (query, key, value), replace(at, seqlens=seqlens, total=total, positions="", rotary=("", "")), bias

    def model(self) -> ModelProto:
        graph = helper.make_graph(
            list(self._nodes.values()), self.name, self._inputs, self._outputs, list(self._initializers.values())
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="ddtree-trt")
