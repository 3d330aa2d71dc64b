"""The TensorRT lowering whose attention is our plugin, `DDTreeAttention`.

Norms, activations and rotary embedding are spelled out in operators that TensorRT's parser has had since version 10.
"""

from __future__ import annotations

import numpy as np

from ddtree_trt import plugins
from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.graph.lowering_tensorrt import TensorRtGraph
from ddtree_trt.build.graph.ops import Attention
from ddtree_trt.models.decoder import BlockMask
from ddtree_trt.plugins import MaskMode


class PluginGraph(TensorRtGraph):
    """`TensorRtGraph` with one plugin node per attention. A call names the cache slot of each sequence."""

    domains = (plugins.NAMESPACE,)

    def slots(self, limits: Limits) -> int:
        return limits.max_batch

    def row_inputs(self, tokens: str, max_tokens: int, *, masked: bool) -> None:
        super().row_inputs(tokens, max_tokens, masked=masked)
        self._max_tokens = max_tokens
        self.input(names.SLOT_IDS, "int32", ["N"])

    def rms_norm(self, x: str, weight: str, out: str, eps: float) -> str:
        single = self._single(x)
        square = self.op("Mul", [single, single], [f"{out}.square"])
        mean = self.op("ReduceMean", [square, self._axis(-1)], [f"{out}.mean"], keepdims=1)
        shifted = self.op("Add", [mean, self.constant(f"eps.{eps:g}", np.array(eps, np.float32))], [f"{out}.shifted"])
        scaled = self.op("Div", [single, self.op("Sqrt", [shifted], [f"{out}.root"])], [f"{out}.scaled"])
        return self._rounded("Mul", [scaled, weight], out)

    def swiglu(self, gate: str, up: str, out: str) -> str:
        single = self._single(gate)
        silu = self.op("Mul", [single, self.op("Sigmoid", [single], [f"{out}.sigmoid"])], [f"{out}.silu"])
        return self._rounded("Mul", [silu, self._single(up)], out)

    def attention(self, qkv: tuple[str, str, str], at: Attention, out: str) -> str:
        return self._attention(qkv, at, MaskMode.TREE, self._mask, out)

    def block_attention(self, qkv: tuple[str, str, str], at: Attention, block: int, mask: BlockMask, out: str) -> str:
        # The plugin requires a mask of rank 3 in every mode and reads it in mode TREE only.
        unread = self.reshape(names.SLOT_IDS, [-1, 1, 1], "no_mask")
        assert not mask.window, "the plugin has no windows; the backend's `check` refuses such drafters before"
        mode = MaskMode.CAUSAL if mask.causal else MaskMode.NONE
        return self.rows_from(self._attention(qkv, at, mode, unread, f"{out}.rows"), -block, out)

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
        axis = self._axis(2)
        cos, sin = (self.op("Unsqueeze", [self._angles(t), axis], [f"{t}.angles"]) for t in at.rotary)
        rotated = [
            self.op(
                kind, [self.op("Mul", [p, cos], [f"{p}.cos"]), self.op("Mul", [q, sin], [f"{q}.sin"])], [f"{p}.new"]
            )
            for kind, p, q in (("Sub", a, b), ("Add", b, a))
        ]
        return self._rounded("Concat", rotated, f"{x}.rotated", axis=-1)
