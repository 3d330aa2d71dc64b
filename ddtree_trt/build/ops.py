"""The operator vocabulary of the graphs, lowered to ONNX Runtime.

`graph.py` speaks in these verbs only; another runtime is another lowering of the same verbs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

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


class Graph:
    """Collects nodes, inputs, outputs and initialisers of one ONNX graph."""

    def __init__(self, name: str, sink: Sink) -> None:
        self.name = name
        self._sink = sink
        self._nodes: list[NodeProto] = []
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

    def op(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attrs: object) -> str:
        """Add one node and return the name of its first output. An empty name is an absent optional input."""
        self._nodes.append(helper.make_node(kind, list(inputs), list(outputs), outputs[0], domain=domain, **attrs))
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

    def rows_from(self, x: str, start: int, out: str) -> str:
        """x[:, start:] along the token axis; a negative start counts from the end."""
        bounds = [("start", start), ("end", np.iinfo(np.int64).max), ("axis", 1)]
        names = [self.constant(f"{n}.{v}", np.array([v], np.int64)) for n, v in bounds]
        return self.op("Slice", [x, *names], [out])

    def swiglu(self, gate: str, up: str, out: str) -> str:
        """silu(gate) · up. QuickGelu with alpha 1 is silu in one pass."""
        silu = self.op("QuickGelu", [gate], [f"{out}.silu"], domain=MICROSOFT, alpha=1.0)
        return self.op("Mul", [silu, up], [out])

    def attention(
        self,
        qkv: tuple[str, str, str],
        past: tuple[str, str],
        present: tuple[str, str],
        control: tuple[str, str, str],
        rotary: tuple[str, str],
        bias: str,
        out: str,
        *,
        heads: tuple[int, int],
    ) -> str:
        """Grouped-query attention that appends to the cache in place.

        qkv are [N, T, heads · D] after the head norms and before rotary embedding. control is (seqlens_k, total_length,
        positions). `causal=0`: what a row sees is the bias alone; an empty bias lets every row see every key.
        """
        inputs = [*qkv, *past, control[0], control[1], *rotary, control[2], bias]
        return self.op(
            "GroupQueryAttention",
            inputs,
            [out, *present],
            domain=MICROSOFT,
            num_heads=heads[0],
            kv_num_heads=heads[1],
            do_rotary=1,
            causal=0,
        )

    def model(self) -> ModelProto:
        graph = helper.make_graph(
            self._nodes, self.name, self._inputs, self._outputs, list(self._initializers.values())
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="ddtree-trt")
