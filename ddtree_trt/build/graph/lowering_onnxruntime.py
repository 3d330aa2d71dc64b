"""The graphs' vocabulary lowered to ONNX Runtime: its fused attention, norms and activations, in float32."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.graph.ops import Attention, Graph, Make, Sink, Table
from ddtree_trt.models.decoder import BlockMask
from ddtree_trt.models.experts import Experts

MICROSOFT = "com.microsoft"


class OnnxRuntimeGraph(Graph):
    """`Graph` of ONNX Runtime's fused operators."""

    domains = (MICROSOFT,)

    def __init__(self, name: str, sink: Sink) -> None:
        super().__init__(name, sink)
        self._bias = ""

    def slots(self, limits: Limits) -> str:
        return "N"

    def table(self, table: Table) -> str:
        return self.weight(table.key, table.make)

    def row_inputs(self, tokens: str, max_tokens: int, *, masked: bool) -> None:
        self.input(names.SEQLENS_K, "int32", ["N"])
        self.input(names.TOTAL_LENGTH, "int32", [])
        self.input(names.POSITIONS, "int64", ["N", tokens])
        if masked:
            self._bias = self.input(names.ATTENTION_BIAS, "float32", ["N", 1, tokens, "W"])

    def head(self, x: str, table: Table, out: str) -> str:
        return self.op("Gemm", [x, self.table(table)], [out], transB=1)

    def choices(self, logits: str) -> None:
        """Adds nothing: ArgMax takes several times as long as NumPy does over the same memory."""

    def most_probable(self, logits: str, candidates: int, outputs: tuple[str, str]) -> str:
        log_probs = self.op("LogSoftmax", [logits], ["all_log_probs"], axis=-1)
        self.op("TopK", [log_probs, self.input(names.TOP_K, "int64", [1])], outputs, axis=-1, largest=1, sorted=1)
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
        count = self.constant(f"top.{experts.per_token}", np.array([experts.per_token], np.int64))
        self.op("TopK", [shares, count], [f"{out}.largest", f"{out}.chosen"], axis=-1, largest=1, sorted=1)
        axis = self.constant("last_axis", np.array([-1], np.int64))
        total = self.op("ReduceSum", [f"{out}.largest", axis], [f"{out}.share"], keepdims=1)
        return self.op("Mul", [mixed, total], [out])

    def attention(self, qkv: tuple[str, str, str], at: Attention, out: str) -> str:
        """The mask is an attention bias."""
        return self._attention(qkv, at, self._bias, out)

    def block_attention(self, qkv: tuple[str, str, str], at: Attention, block: int, mask: BlockMask, out: str) -> str:
        if mask.causal:
            # The kernel's own window counts the rows before the current one and itself.
            window = {"local_window_size": mask.window} if mask.window else {}
            seen = self._attention(qkv, at, "", f"{out}.rows", **window)
        else:
            bias = self._window_bias(block, mask) if mask.window else ""
            seen = self._attention(qkv, at, bias, f"{out}.rows", causal=0)
        return self.rows_from(seen, -block, out)

    def _attention(self, qkv: tuple[str, str, str], at: Attention, bias: str, out: str, **attrs: int) -> str:
        """`bias`: float32 [N, 1, T, W], or "" where nothing is hidden."""
        inputs = [*qkv, *at.past, names.SEQLENS_K, names.TOTAL_LENGTH, *at.rotary, names.POSITIONS, bias]
        attrs |= {"num_heads": at.heads[0], "kv_num_heads": at.heads[1], "do_rotary": 1}
        return self.op("GroupQueryAttention", inputs, [out, *at.present], domain=MICROSOFT, **attrs)

    def _window_bias(self, block: int, mask: BlockMask) -> str:
        """The bias [1, 1, T, W] that hides keys outside of the windows of the last `block` rows."""
        name = f"window.{mask.window}"
        hidden = self._outside(block, mask.window)
        before = self.op("Shape", [names.POSITIONS], ["rows.all"], start=1)
        before = self.op("Sub", [before, self.constant(f"rows.{block}", np.array([block], np.int64))], ["rows.context"])
        none = [self.constant(f"zeros.{n}", np.zeros(n, np.int64)) for n in (2, 5)]
        pads = self.concat([none[0], before, none[1]], "window.pads", axis=0)
        return self.op("Pad", [hidden, pads], [f"{name}.bias"])

    def _outside(self, block: int, window: int) -> str:
        """float32 [1, 1, block, W]: the lowest number where a key is `window` positions or more from one of the last
        `block` rows, else 0."""
        name = f"window.{window}"
        own = self.reshape(self.rows_from(names.POSITIONS, -block, "positions.end"), [1, 1, block, 1], "block.own")
        end = self.op("Cast", [names.TOTAL_LENGTH], ["columns.end"], to=TensorProto.INT64)
        first, step = (self.constant(f"integer.{v}", np.array(v, np.int64)) for v in (0, 1))
        keys = self.op("Range", [first, end, step], ["columns.keys"])
        away = self.op("Abs", [self.op("Sub", [keys, own], ["block.distances"])], ["block.away"])
        near = self.op("Less", [away, self.constant(f"{name}.width", np.array(window, np.int64))], [f"{name}.near"])
        lowest = self.constant("lowest", np.array(np.finfo(np.float32).min, np.float32))
        return self.op("Where", [near, self.constant("nothing", np.array(0, np.float32)), lowest], [f"{name}.outside"])
