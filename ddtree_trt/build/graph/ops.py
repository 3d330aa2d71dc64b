"""The operator vocabulary of the graphs: the operators that all lowerings share, and those each lowers in its own way.

The networks use these methods only. The lowerings: `lowering_onnxruntime.py`, also with integer products;
`lowering_tensorrt.py`, with our plugins or with TensorRT's own attention.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.checkpoint.scales import Scales
from ddtree_trt.errors import BuildError
from ddtree_trt.models.decoder import BlockMask, Experts, TransformerDims
from ddtree_trt.models.delta import DeltaNet

TYPES = {
    "float8_e4m3fn": TensorProto.FLOAT8E4M3FN,
    "int8": TensorProto.INT8,
    "int4": TensorProto.INT4,
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "uint8": TensorProto.UINT8,
    "bool": TensorProto.BOOL,
}

Shape = Sequence[int | str]
Fine = tuple[int, int]  # numbers of outputs: the first ones, and the last ones, whose errors cost the most
Make = Callable[[], np.ndarray]  # returns an array when it is needed: float32, or the bytes of quantised values


class Sink(Protocol):
    """A store of weights: `add` stores an array once under its key and returns the initialiser that refers to it."""

    def add(self, key: str, make: Make, dtype: str) -> TensorProto: ...


@dataclass(frozen=True)
class Table:
    """An embedding or language-model head that both networks may use."""

    name: str  # of the graph's input, where an engine keeps tables outside of its graphs
    key: str  # in the weight file, where it keeps them inside
    make: Make
    shape: tuple[int, int]  # [V, H]


@dataclass(frozen=True)
class Attention:
    """The inputs of an attention apart from its rows: the layer, rotary tables, and the shape of its heads."""

    layer: int  # of those with attention
    rotary: tuple[str, str]  # cosine, sine: float32 [S, rotated elements / 2]
    heads: tuple[int, int]  # Hq, Hkv
    head_dim: int  # D
    rotated: int  # elements of a head that are rotated, its first


@dataclass(frozen=True)
class Delta:
    """The inputs of a gated delta net apart from its rows; weights are float32."""

    layer: int  # of the delta-net layers
    net: DeltaNet
    conv: str  # [taps, C]
    decay: str  # [Hv]
    step_bias: str  # [Hv]
    head_norm: str  # [Dv]
    eps: float  # of that norm


class Graph(ABC):
    """One ONNX graph in the making: nodes, inputs, outputs and initialisers. Methods return names of tensors."""

    floats = "float32"  # type the network computes in
    integers = "int64"  # type of ids, positions and row numbers
    opset = 21  # version of ONNX's own operators
    ir_version = 10  # of the file format, the lowest that has them
    rotates = False  # whether language models have a rotated residual stream, which is worth its two products in 8 bits
    domains: tuple[str, ...] = ()  # of operators that are not ONNX's own

    def __init__(self, name: str, sink: Sink) -> None:
        self.name = name
        self._sink = sink
        self._nodes: dict[str, NodeProto] = {}
        self._inputs: list[ValueInfoProto] = []
        self._outputs: list[ValueInfoProto] = []
        self._initializers: dict[str, TensorProto] = {}

    # Inputs, outputs and weights

    def input(self, name: str, dtype: str, shape: Shape) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, TYPES[dtype], list(shape)))
        return name

    def states(self, name: str, shape: Shape) -> str:
        """Add an input of another network's states; returns them in `floats`."""
        return self.input(name, self.floats, shape)

    def output(self, name: str, dtype: str, shape: Shape) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, TYPES[dtype], list(shape)))

    def weight(self, key: str, make: Make, dtype: str | None = None) -> str:
        """A weight in the external file, in `floats` unless said otherwise; `make` runs only when the key is new."""
        if key not in self._initializers:
            self._initializers[key] = self._sink.add(key, make, dtype or self.floats)
        return key

    def constant(self, name: str, value: np.ndarray) -> str:
        if name not in self._initializers:
            self._initializers[name] = numpy_helper.from_array(value, name)
        return name

    def number(self, value: Any, dtype: Any = None) -> str:
        """A constant, a number or a list of numbers, that is named by what it is: int64, or of floats float32."""
        array = np.array(value)
        array = array.astype(dtype or (np.float32 if array.dtype.kind == "f" else np.int64))
        return self.constant(f"{array.dtype}.{array.tolist()}".replace(" ", ""), array)

    # Operators of every runtime

    def op(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attrs: Any) -> str:
        """Add a node, unless the graph has it, and return the name of its first output. An empty name is an absent
        optional input."""
        node = helper.make_node(kind, list(inputs), list(outputs), name=outputs[0], domain=domain, **attrs)
        assert self._nodes.setdefault(outputs[0], node) == node, f"two nodes write {outputs[0]}"
        return outputs[0]

    def embed(self, table: Table, token_ids: str, out: str) -> str:
        return self.op("Gather", [self.table(table), token_ids], [out], axis=0)

    def product(self, x: str, weight: str, out: str) -> str:
        """x [..., in] times weight [in, out]."""
        return self.op("MatMul", [x, weight], [out])

    def row_product(self, x: str, weight: str, out: str) -> str:
        """As `product` of rows x [..., R, in], with the same bits for a row whatever R is. Kernels for one row sum in
        another order than those for several, so a row of zeros is multiplied as well."""
        axis = self.number([-2])
        padded = self.op("Pad", [x, self.number([0, 1]), "", axis], [f"{out}.padded"])
        products = self.product(padded, weight, f"{out}.products")
        return self.op("Slice", [products, self.number([0]), self.number([-1]), axis], [out])

    def linear(self, x: str, key: str, make: Make, out: str, gated: int = 0, fine: Fine | None = None) -> str:
        """A projection of a layer: rows x [..., in] times the weight [in, out] that `make` returns, which is stored
        under `key` in whatever form this graph multiplies it in. `gated`: x are gate and up, each so wide, and the
        rows are silu(gate) · up. Where products are rounded, `fine` says which outputs are worth a more precise one."""
        return self.product(self.gated_unit(x, gated, out) if gated else x, self.weight(key, make), out)

    def gated_unit(self, both: str, width: int, out: str) -> str:
        """silu(gate) · up of rows of gate and up."""
        gate, up = self.split(both, [width, width], [f"{out}.gate", f"{out}.up"])
        return self.swiglu(gate, up, f"{out}.swiglu")

    def linear_quantized(self, x: str, weight: str, scales: Scales, out: str) -> str:
        """As `linear`, for a quantised weight [in, out]; x is scaled and rounded as `scales` say."""
        if scales.smooth is not None:
            x = self.op("Mul", [x, self._scale(f"{weight}.smooth", scales.smooth)], [f"{out}.smooth"])
        zero = f"{scales.values}.zero"  # its type is the one QuantizeLinear rounds to
        if scales.input is not None:
            none = helper.make_tensor(zero, TYPES[scales.values], [], b"\0", raw=True)
            self._initializers.setdefault(zero, none)
            step = self._scale(f"{weight}.input", np.float32(scales.input))
            rounded = self.op("QuantizeLinear", [x, step, zero], [f"{out}.rounded"])
            x = self.op("DequantizeLinear", [rounded, step, zero], [f"{out}.rows"])
        # One scale for all, for each column of [in, out], or for each group of rows of a column.
        attrs: dict[str, Any] = ({}, {"axis": 1}, {"axis": 0, "block_size": scales.group})[scales.weight.ndim]
        inputs = [weight, self._scale(f"{weight}.scale", scales.weight.T), *(() if attrs else (zero,))]
        return self.product(x, self.op("DequantizeLinear", inputs, [f"{weight}.values"], **attrs), out)

    def _scale(self, name: str, values: NDArray[np.float32] | np.float32) -> str:
        """Scales in `floats`, as DequantizeLinear returns. Raises BuildError where that type cannot hold one."""
        values = np.asarray(values)
        if self.floats == "float16":
            outside = values[(values < 2.0**-14) | (values > 65504)]
            if outside.size:
                raise BuildError(f"{name} is {outside[0]:g}, which fp16 cannot hold; use --precision bf16")
        if values.ndim:
            return self.weight(name, lambda: np.ascontiguousarray(values))
        self._initializers[name] = helper.make_tensor(name, TYPES[self.floats], [], [float(values)])
        return name

    def after_contexts(self, contexts: str, blocks: str, out: str) -> str:
        """Rows of contexts [N, C, H] and then those of blocks [N, block, H], as attention takes them."""
        return self.concat([contexts, blocks], out, axis=1)

    def split(self, x: str, sizes: Sequence[int], outputs: Sequence[str]) -> Sequence[str]:
        self.op("Split", [x, self.number(sizes)], outputs, axis=-1)
        return outputs

    def reshape(self, x: str, shape: Sequence[int], out: str) -> str:
        return self.op("Reshape", [x, self.number(shape)], [out])

    def concat(self, parts: Sequence[str], out: str, *, axis: int) -> str:
        return self.op("Concat", parts, [out], axis=axis)

    def scaled(self, x: str, factor: float) -> str:
        if factor == 1:
            return x
        return self.op("Mul", [x, self._scale(f"{x}.factor", np.float32(factor))], [f"{x}.scaled"])

    def capped(self, logits: str, factor: float, cap: float) -> str:
        """Float32 logits times a factor and then, unless `cap` is 0, cap · tanh(logits / cap)."""
        x = logits
        if factor != 1:
            x = self.op("Mul", [x, self.number(factor)], [f"{logits}.scaled"])
        if not cap:
            return x
        relative = self.op("Mul", [x, self.number(1 / cap)], [f"{logits}.relative"])
        inner = self.op("Tanh", [relative], [f"{logits}.tanh"])
        return self.op("Mul", [inner, self.number(cap)], [f"{logits}.capped"])

    def cast(self, x: str, dtype: str, out: str) -> str:
        return self.op("Cast", [x], [out], to=TYPES[dtype])

    def rows_from(self, x: str, start: int, out: str) -> str:
        """x[:, start:] along the token axis; a negative start counts from the end."""
        return self.rows_between(x, start, np.iinfo(np.int64).max, out)

    def rows_between(self, x: str, start: int, end: int, out: str) -> str:
        """x[:, start:end] along the token axis; negative bounds count from the end."""
        return self.op("Slice", [x, self.number([start]), self.number([end]), self.number([1])], [out])

    # Operators that each runtime lowers in its own way

    @abstractmethod
    def cache(self, dims: TransformerDims, limits: Limits) -> None:
        """Add the caches of all layers."""

    @abstractmethod
    def table(self, table: Table) -> str:
        """The tensor of its values [V, H]."""

    @abstractmethod
    def row_inputs(self, tokens: str, max_tokens: int, *, masked: bool) -> None:
        """Add the inputs that place the `tokens` rows of a call, at most `max_tokens`, in the cache, and with `masked`
        those that state which of them see which."""

    @abstractmethod
    def head(self, x: str, table: Table, out: str) -> str:
        """Logits float32: x [R, H] times the transpose of a table [V, H], laid out as the embedding, to share it."""

    @abstractmethod
    def choices(self, logits: str) -> None:
        """Add the output `choices`, `integers` [R]: the column of the largest value in each row of logits [R, V]. Where
        logits are in host memory nothing is added, and the host computes it."""

    @abstractmethod
    def most_probable(self, logits: str, candidates: int, outputs: tuple[str, str]) -> int | str:
        """Log-probabilities and ids of the most probable of logits [N, L, V], falling: [N, L, K] each. Returns K: at
        most `candidates`, or a name where the caller chooses it per call."""

    @abstractmethod
    def rms_norm(self, x: str, weight: str, out: str, eps: float) -> str:
        """x / sqrt(mean(x²) + eps) · weight over the last axis; weight is float32."""

    @abstractmethod
    def add_rms_norm(self, x: str, residual: str, weight: str, out: str, eps: float) -> tuple[str, str]:
        """Returns (rms_norm(x + residual), x + residual)."""

    @abstractmethod
    def swiglu(self, gate: str, up: str, out: str) -> str:
        """silu(gate) · up."""

    def experts(self, x: str, logits: str, key: str, projections: tuple[Make, Make], experts: Experts, out: str) -> str:
        """The mixture of experts over rows x [N, T, H] with the router's logits [N, T, E]. `projections` make the
        weights, stored under `key`: gate and up [E, 2·inner, H], gate before up, and down [E, H, inner]."""
        raise NotImplementedError  # the backends' `check` refuses such networks

    @abstractmethod
    def attention(self, qkv: tuple[str, str, str], at: Attention, out: str) -> str:
        """Grouped-query attention that appends to the cache in place: a row sees the past, and those rows of the call
        that the mask allows. qkv are [N, T, heads · D], before rotary embedding; so is what it returns."""

    @abstractmethod
    def block_attention(self, qkv: tuple[str, str, str], at: Attention, block: int, mask: BlockMask, out: str) -> str:
        """As `attention`, but the last `block` rows see the rows that `mask` allows. Returns their results
        [N, block, Hq · D]."""

    def gated(self, x: str, gate: str, out: str) -> str:
        """x times the sigmoid of the gate."""
        return self.op("Mul", [x, self.op("Sigmoid", [gate], [f"{out}.sigmoid"])], [out])

    def delta_net(self, projected: str, at: Delta, out: str) -> str:
        """A gated delta net over rows that see their ancestors and the slot's state: what its projections gave
        [N, T, sum of `projected_widths`] → [N, T, Hv · Dv], normed and gated."""
        raise NotImplementedError  # hybrids are built with native attention

    def model(self) -> ModelProto:
        graph = helper.make_graph(
            list(self._nodes.values()), self.name, self._inputs, self._outputs, list(self._initializers.values())
        )
        opsets = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(domain, 1) for domain in self.domains)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=self.ir_version, producer_name="ddtree-trt")
