"""The graphs' vocabulary lowered to ONNX Runtime: its fused norms and activations, and our attention, in float32
beside caches of the precision's own type.

One call takes all sequences: their rows follow each other without padding, and `slots` says which are whose.
"""

import math

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import plugins
from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits, cpu_cache_bytes, cpu_cache_rows
from ddtree_trt.artifact.precisions import PRECISIONS, PrecisionName
from ddtree_trt.build.graph.ops import Attention, Delta, Fine, Graph, Make, Shape, Table
from ddtree_trt.build.graph.rotation import walsh
from ddtree_trt.models.decoder import BlockMask, Experts, TransformerDims
from ddtree_trt.plugins import MaskMode

MICROSOFT = "com.microsoft"


class OnnxRuntimeGraph(Graph):
    domains = (MICROSOFT, plugins.NAMESPACE)
    precision: PrecisionName = "fp32"

    def table(self, table: Table) -> str:
        return self.weight(table.key, table.make)

    def cache(self, dims: TransformerDims, limits: Limits) -> None:
        self._rows = cpu_cache_rows(limits)
        head_bytes = cpu_cache_bytes(dims.head_dim, limits, self.precision)
        self.input(names.CACHE, "uint8", [len(dims.attention_layers), "S", dims.num_kv_heads, head_bytes])
        if (d := dims.delta) and (layers := len(dims.delta_layers)):
            self.input(names.STATES, "float32", [layers, "S", d.state_values])
            self.input(names.MOVES, "float32", [layers, "moved", d.moved_values])

    def row_inputs(self, tokens: str, max_tokens: int, *, masked: bool) -> None:
        self.input(names.SLOTS, "int64", ["sequences", 5])
        self.input(names.PARENTS, "int32", ["P"])

    def head(self, x: str, table: Table, out: str) -> str:
        return self.op("Gemm", [x, self.table(table)], [out], transB=1)

    def choices(self, logits: str) -> None:
        """Adds nothing: ArgMax takes several times as long as NumPy does over the same memory."""

    def most_probable(self, logits: str, candidates: int, outputs: tuple[str, str]) -> str:
        log_probs = self.op("LogSoftmax", [logits], ["all_log_probs"], axis=-1)
        self.op("TopK", [log_probs, self.input(names.TOP_K, "int64", [1])], outputs, axis=-1)
        return "K"

    def rms_norm(self, x: str, weight: str, out: str, eps: float) -> str:
        return self.op("SimplifiedLayerNormalization", [x, weight], [out], axis=-1, epsilon=eps)

    def add_rms_norm(self, x: str, residual: str, weight: str, out: str, eps: float) -> tuple[str, str]:
        total = f"{out}.sum"
        outputs = [out, "", "", total]
        node = "SkipSimplifiedLayerNormalization"
        self.op(node, [x, residual, weight], outputs, domain=MICROSOFT, epsilon=eps)
        return out, total

    def swiglu(self, gate: str, up: str, out: str) -> str:
        """QuickGelu with alpha 1 is silu in one pass."""
        silu = self.op("QuickGelu", [gate], [f"{out}.silu"], domain=MICROSOFT, alpha=1.0)
        return self.op("Mul", [silu, up], [out])

    def experts(self, x: str, logits: str, key: str, projections: tuple[Make, Make], experts: Experts, out: str) -> str:
        """The kernel wants gate and up row by row in turn, and takes the softmax and the largest of it by itself. What
        it calls swiglu is (up + beta) · gate · sigmoid(alpha · gate)."""

        def in_turn() -> np.ndarray:
            both = projections[0]()
            count, rows, width = both.shape
            return both.reshape(count, 2, rows // 2, width).swapaxes(1, 2).reshape(count, rows, width)

        flat = self.reshape(logits, [-1, experts.count], f"{out}.logits")
        first, second = self.weight(f"{key}.gate_up", in_turn), self.weight(f"{key}.down", projections[1])
        mixed = out if experts.normalised else f"{out}.normalised"
        self.op(
            "MoE",
            [x, flat, first, "", second],
            [mixed],
            domain=MICROSOFT,
            k=experts.per_token,
            normalize_routing_weights=1,
            activation_type="swiglu",
            swiglu_fusion=1,
            activation_alpha=1.0,
            activation_beta=0.0,
        )
        if experts.normalised:
            return mixed
        # Without normalize_routing_weights the kernel (1.31) zeroes its result before it reads x. Where nothing uses x
        # later, the runtime keeps both in one buffer, and the mixture is 0. With it the kernel copies x first.
        shares = self.op("Softmax", [logits], [f"{out}.shares"], axis=-1)
        best = self.op("TopK", [shares, self.number([experts.per_token])], [f"{out}.largest", f"{out}.chosen"], axis=-1)
        total = self.op("ReduceSum", [best, self.number([-1])], [f"{out}.share"], keepdims=1)
        return self.op("Mul", [mixed, total], [out])

    def states(self, name: str, shape: Shape) -> str:
        return super().states(name, [1, *shape[1:]])

    def after_contexts(self, contexts: str, blocks: str, out: str) -> str:
        """The contexts of all sequences, then their blocks: [1, C + N · block, H]."""
        return self.concat([contexts, self.reshape(blocks, [1, -1, 0], f"{out}.blocks")], out, axis=1)

    def attention(self, qkv: tuple[str, str, str], at: Attention, out: str) -> str:
        return self._attention(qkv, at, MaskMode.TREE, 0, out)

    def block_attention(self, qkv: tuple[str, str, str], at: Attention, block: int, mask: BlockMask, out: str) -> str:
        seen = self._attention(qkv, at, MaskMode.CAUSAL if mask.causal else MaskMode.NONE, mask.window, f"{out}.rows")
        return self.reshape(seen, [-1, block, at.heads[0] * at.head_dim], out)

    def delta_net(self, projected: str, at: Delta, out: str) -> str:
        """One operator from projection to projection. It walks the trees node by node, each from its parent's state, so
        that a row's bits are those of its path alone; a tree's matrices would sum in an order of their own."""
        d = at.net
        inputs = [projected, at.conv, at.decay, at.step_bias, at.head_norm]
        attrs = {
            "key_heads": d.key_heads,
            "value_heads": d.value_heads,
            "key_dim": d.key_dim,
            "value_dim": d.value_dim,
            "taps": d.taps,
            "layer": at.layer,
            "epsilon": at.eps,
        }
        inputs += [names.SLOTS, names.PARENTS, names.STATES, names.MOVES]
        return self.op(plugins.DELTA_NET, inputs, [out], domain=plugins.NAMESPACE, **attrs)

    def _attention(self, qkv: tuple[str, str, str], at: Attention, mode: MaskMode, window: int, out: str) -> str:
        """[1, rows of nodes, Hq · D]."""
        inputs = [*qkv, *at.rotary, names.SLOTS, names.PARENTS, names.CACHE]
        attrs = {
            plugins.NUM_Q_HEADS: at.heads[0],
            plugins.NUM_KV_HEADS: at.heads[1],
            plugins.HEAD_DIM: at.head_dim,
            plugins.MASK_MODE: int(mode),
            "window": window,
            "layer": at.layer,
            "rows": self._rows,
            "half": int(PRECISIONS[self.precision].cache_bytes == 2),
        }
        return self.op(plugins.ATTENTION, inputs, [out], domain=plugins.NAMESPACE, **attrs)


LARGEST = 127  # of a quantised value, to either side of zero
PANEL, STEP = 16, 4  # outputs whose weights lie together, and inputs of each: PANEL and STEP of cpu_product.h
PARTS = 64  # of a row of SwiGLU, or the largest divisor of both: one value of each are rotated together


class Int8Graph(OnnxRuntimeGraph):
    """The same with matrix products in 8-bit integers: W8A8, for CPUs.

    Weights are quantised once, with a scale for each output channel; activations as they come, with a scale for each
    row. So the other rows of a pass do not change a row's product, as they would with one scale for a whole tensor
    (`DynamicQuantizeMatMul`), and sums of integers are exact. All of that is one operator of ours, `DDTreeProduct`.
    Everything but products of rows and weights stays in float32: embedding, norms, attention.

    A row with a few values far larger than the others has no good scale. Hidden states are such rows, so the residual
    stream is rotated (`rotation.py`), which costs nothing; what comes out of SwiGLU is too, and is rotated as it comes,
    by a few additions a value.
    """

    precision = "int8"
    rotates = True

    def linear(self, x: str, key: str, make: Make, out: str, gated: int = 0, fine: Fine | None = None) -> str:
        """What comes out of SwiGLU is transformed before it is rounded; fine outputs add a second product with what
        rounding took from their weights."""
        parts, extra = math.gcd(gated, PARTS) if gated else 0, fine[1] if fine else 0
        scales: list[NDArray[np.float32]] = []

        def packed() -> NDArray[np.uint8]:
            weight = make()
            if gated:
                weight = walsh(weight.T, parts).T / np.float32(parts)
            if extra:  # behind it what rounding takes from its last columns
                fine_columns = weight[:, -extra:]
                values, scale = quantize_channels(fine_columns)
                weight = np.concatenate((weight, fine_columns - values * scale), axis=1)
            values, scale = quantize_channels(weight)
            scales.append(scale)
            return pack(values)

        inputs = [x, self.weight(f"{key}.int8", packed, "uint8")]
        inputs.append(self.weight(f"{key}.scale", lambda: scales[0], "float32"))
        return self.op(plugins.PRODUCT, inputs, [out], domain=plugins.NAMESPACE, parts=parts, fine=extra)

    def head(self, x: str, table: Table, out: str) -> str:
        return self.linear(x, table.key, lambda: table.make().T, out)


def pack(values: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Integers [in, out] as `DDTreeProduct` reads them: 128 more, [out / PANEL, in / STEP, PANEL, STEP] with zeros for
    what is missing at the ends."""
    padded = np.pad(values, [(0, -size % of) for size, of in zip(values.shape, (STEP, PANEL), strict=True)])
    steps, panels = padded.shape[0] // STEP, padded.shape[1] // PANEL
    order = padded.reshape(steps, STEP, panels, PANEL).transpose(2, 0, 3, 1)
    return np.ascontiguousarray(order).view(np.uint8) ^ np.uint8(128)


def quantize_channels(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """(int8 values [in, out], scales [out]) of a weight [in, out], which is their product to half a scale. Symmetric:
    no value is below -127."""
    largest = np.maximum(weight.max(0), -weight.min(0))
    scale = np.maximum(largest, np.finfo(np.float32).tiny) / np.float32(LARGEST)
    values = np.empty(weight.shape, np.int8)
    for row, source in zip(values, weight, strict=True):  # row by row: the largest weight is not held twice
        np.rint(source / scale, out=row, casting="unsafe")
    return values, scale
