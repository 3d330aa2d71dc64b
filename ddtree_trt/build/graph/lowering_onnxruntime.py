"""The graphs' vocabulary lowered to ONNX Runtime: its fused norms and activations, and our attention, in float32
beside caches of the precision's own type.

One call takes all sequences: their rows follow each other without padding, and `slots` says which are whose.
"""

import numpy as np

from ddtree_trt import plugins
from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits, cpu_cache_bytes, cpu_cache_rows
from ddtree_trt.artifact.precisions import PRECISIONS, PrecisionName
from ddtree_trt.build.graph.ops import Attention, Delta, Graph, Make, Shape, Table
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
