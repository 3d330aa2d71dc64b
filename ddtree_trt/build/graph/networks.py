"""The two networks, built by hand as ONNX graphs: the target and the DFlash drafter.

Both are written once, in the verbs of `ops.Graph`, for every runtime. Weights are asked for by their Hugging Face names
and go to the graph's sink one by one, so that building needs little more memory than the largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import ModelProto

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import DrafterDims, Limits, TransformerDims
from ddtree_trt.build.checkpoint.reader import EMBEDDING, FC, HEAD
from ddtree_trt.build.checkpoint.scales import QuantizedWeights, side_by_side
from ddtree_trt.build.graph.ops import Attention, Graph, Table

Weights = Callable[[str], np.ndarray]  # Hugging Face tensor name → float32 array


def rotary_tables(dims: TransformerDims, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine [rows, D/2] of the rotary embedding, computed in float64 and rounded once."""
    inverse = dims.rope_theta ** (-np.arange(0, dims.head_dim, 2, dtype=np.float64) / dims.head_dim)
    angles = np.outer(np.arange(rows, dtype=np.float64), inverse)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class _Network:
    """What the target and the drafter have in common: their layers, their caches, their rotary tables."""

    def __init__(
        self,
        graph: Graph,
        dims: TransformerDims,
        weights: Weights,
        limits: Limits,
        prefix: str,
        quantized: QuantizedWeights | None = None,
    ) -> None:
        self.g, self.dims, self.weights, self.prefix, self.quantized = graph, dims, weights, prefix, quantized
        rows, half = limits.cache_rows, dims.head_dim // 2
        key = f"{prefix}rotary.{half}.{dims.rope_theta:g}"
        cos = graph.weight(f"{key}.cos", lambda: rotary_tables(dims, rows)[0], "float32")
        sin = graph.weight(f"{key}.sin", lambda: rotary_tables(dims, rows)[1], "float32")
        self.rotary = (cos, sin)
        self.caches = graph.cache(dims, limits)

    def joined(self, *sources: str) -> np.ndarray:
        """One or several projections side by side [in, out], by their Hugging Face names."""
        return np.ascontiguousarray(np.concatenate([self.weights(s) for s in sources], axis=0).T)

    def linear(self, x: str, name: str, *sources: str, out: str) -> str:
        """x [..., in] times one or several projections side by side, by their Hugging Face names.

        Quantised projections are multiplied as they are stored, and one by one where their rows are treated
        differently or they have other scales than can lie side by side.
        """
        quantized = self.quantized
        each = [quantized.scales(source) if quantized else None for source in sources]
        found = [scales for scales in each if scales is not None]
        if quantized is None or not found:
            return self.g.linear(x, self.prefix + name, lambda: self.joined(*sources), out)
        shared = side_by_side(found) if len(found) == len(sources) else None
        if shared is None:
            parts = [self.linear(x, source, source, out=f"{source}.out") for source in sources]
            return self.g.concat(parts, out, axis=-1)

        def stored() -> np.ndarray:
            # Transposed, bytes that hold two rows of a column each are ONNX's packing of [in, out].
            return np.ascontiguousarray(np.concatenate([quantized.stored(s) for s in sources], axis=0).T)

        return self.g.linear_quantized(x, self.g.weight(self.prefix + name, stored, shared.values), shared, out)

    def norm(self, name: str) -> str:
        return self.g.weight(self.prefix + name, lambda: self.weights(name), "float32")

    def layer(self, index: int) -> Attention:
        """What layer `index` attends to."""
        d = self.dims
        return Attention(*self.caches[index], self.rotary, (d.num_heads, d.num_kv_heads), d.head_dim)

    def qkv(self, layer: str, h: str) -> tuple[str, str, str]:
        """Queries, keys and values [N, rows, heads · D] of rows h [N, rows, H], heads normed."""
        g, d = self.g, self.dims
        sources = [f"{layer}.self_attn.{p}_proj.weight" for p in "qkv"]
        qkv = self.linear(h, f"{layer}.qkv", *sources, out=f"{layer}.qkv.out")
        widths = [n * d.head_dim for n in (d.num_heads, d.num_kv_heads, d.num_kv_heads)]
        q, k, v = g.split(qkv, widths, [f"{layer}.{p}" for p in "qkv"])
        return self.head_norm(layer, q, "q", d.num_heads), self.head_norm(layer, k, "k", d.num_kv_heads), v

    def head_norm(self, layer: str, x: str, part: str, heads: int) -> str:
        """RMS norm of every head of x [N, rows, heads · D]."""
        g, d = self.g, self.dims
        split = g.reshape(x, [0, 0, heads, d.head_dim], f"{x}.heads")
        normed = g.rms_norm(split, self.norm(f"{layer}.self_attn.{part}_norm.weight"), f"{x}.normed", d.rms_norm_eps)
        return g.reshape(normed, [0, 0, heads * d.head_dim], f"{x}.flat")

    def mlp(self, layer: str, h: str) -> str:
        g, width = self.g, self.dims.intermediate_size
        sources = [f"{layer}.mlp.{p}_proj.weight" for p in ("gate", "up")]
        both = self.linear(h, f"{layer}.gate_up", *sources, out=f"{layer}.gate_up.out")
        gate, up = g.split(both, [width, width], [f"{layer}.gate", f"{layer}.up"])
        inner = g.swiglu(gate, up, f"{layer}.swiglu")
        return self.linear(inner, f"{layer}.down", f"{layer}.mlp.down_proj.weight", out=f"{layer}.mlp")

    def project(self, layer: str, attn: str) -> str:
        return self.linear(attn, f"{layer}.o", f"{layer}.self_attn.o_proj.weight", out=f"{layer}.o.out")


def _embedding(dims: TransformerDims, weights: Weights, prefix: str) -> Table:
    shape = (dims.vocab_size, dims.hidden_size)
    return Table(names.EMBEDDING, f"{prefix}{EMBEDDING}", lambda: weights(EMBEDDING), shape)


def _head(dims: TransformerDims, weights: Weights, prefix: str, tied: bool) -> Table:
    """The language-model head: the embedding itself when tied."""
    if tied:
        return _embedding(dims, weights, prefix)
    shape = (dims.vocab_size, dims.hidden_size)
    return Table(names.HEAD, f"{prefix}lm_head", lambda: weights(HEAD), shape)


def build_target_graph(
    g: Graph,
    dims: TransformerDims,
    weights: Weights,
    *,
    tap_layers: tuple[int, ...],
    limits: Limits,
    tied: bool,
    prefix: str = "",
    quantized: QuantizedWeights | None = None,
) -> ModelProto:
    """The target: T tokens of N slots on top of their caches → logits of R rows, tapped hidden states, and where the
    logits stay on a device, the choices.

    A chain under a causal mask is a prefill, a tree under an ancestor-only mask a verification; the graph is the same.
    With no tap_layers it is a plain language model (an autoregressive drafter); `prefix` keeps its weights apart.
    Without `quantized` no row is rounded: quantised weights are taken for what they stand for.
    """
    token_ids = g.input(names.TOKEN_IDS, g.integers, ["N", "T"])
    g.place("T", limits.max_tokens_per_pass, masked=True)
    rows = g.input(names.ROWS, g.integers, ["R"])
    net = _Network(g, dims, weights, limits, prefix, quantized)
    eps = dims.rms_norm_eps

    x = g.embed(_embedding(dims, weights, prefix), token_ids, "embedded")
    h = g.rms_norm(x, net.norm("model.layers.0.input_layernorm.weight"), "layers.0.input", eps)
    taps = []
    for i in range(dims.num_layers):
        layer = f"model.layers.{i}"
        attn = g.attention(net.qkv(layer, h), net.layer(i), f"{layer}.attn")
        attn = net.project(layer, attn)
        norm = net.norm(f"{layer}.post_attention_layernorm.weight")
        h, x = g.add_rms_norm(attn, x, norm, f"{layer}.post", eps)
        mlp = net.mlp(layer, h)
        last = i + 1 == dims.num_layers
        norm = net.norm("model.norm.weight" if last else f"model.layers.{i + 1}.input_layernorm.weight")
        h, x = g.add_rms_norm(mlp, x, norm, f"{layer}.next", eps)
        if i in tap_layers:
            taps.append(x)
    if taps:
        g.concat(taps, names.TAPS, axis=-1)
        g.output(names.TAPS, g.floats, ["N", "T", len(taps) * dims.hidden_size])
    flat = g.reshape(h, [-1, dims.hidden_size], "hidden")
    wanted = g.op("Gather", [flat, rows], ["wanted"], axis=0)
    g.head(wanted, _head(dims, weights, prefix, tied), names.LOGITS)
    g.output(names.LOGITS, "float32", ["R", dims.vocab_size])
    g.choices(names.LOGITS)
    return g.model()


def build_drafter_graph(
    g: Graph,
    dims: DrafterDims,
    weights: Weights,
    *,
    target_weights: Weights,
    target_tied: bool,
    limits: Limits,
) -> ModelProto:
    """The DFlash drafter: C new context rows and one block [bonus, MASK × L] → top-K log-probabilities per position.

    Context rows are the tapped target states of committed tokens, projected by `fc` and normed; every layer appends
    their keys and values, then the block's, and the block attends to all of them without a mask. The next call starts
    at the end of the context and overwrites the block's rows. The context rows pass through the fused projection with
    the block, which costs their queries and saves a second matrix product per layer; those outputs are dropped.
    Embedding and language-model head are the target's.
    """
    block, eps = dims.block_size, dims.rms_norm_eps
    taps = g.input(names.TAPS, g.floats, ["N", "C", len(dims.tap_layers) * dims.hidden_size])
    token_ids = g.input(names.TOKEN_IDS, g.integers, ["N", block])
    g.place("C+block", max(limits.prefill_chunk, block) + block, masked=False)
    net = _Network(g, dims, weights, limits, "drafter.")

    # Hidden states have a few values so large that in 8 bits the others would vanish: this product is never rounded.
    projected = g.product(taps, g.weight(f"{net.prefix}fc", lambda: net.joined(FC)), "fc.out")
    context = g.rms_norm(projected, net.norm("hidden_norm.weight"), "context", eps)
    x = g.embed(_embedding(dims, target_weights, ""), token_ids, "embedded")
    h = g.rms_norm(x, net.norm("layers.0.input_layernorm.weight"), "layers.0.input", eps)
    for i in range(dims.num_layers):
        layer = f"layers.{i}"
        rows = g.concat([context, h], f"{layer}.rows", axis=1)
        attn = g.block_attention(net.qkv(layer, rows), net.layer(i), block, f"{layer}.attn")
        attn = net.project(layer, attn)
        h, x = g.add_rms_norm(attn, x, net.norm(f"{layer}.post_attention_layernorm.weight"), f"{layer}.post", eps)
        mlp = net.mlp(layer, h)
        last = i + 1 == dims.num_layers
        norm = net.norm("norm.weight" if last else f"layers.{i + 1}.input_layernorm.weight")
        h, x = g.add_rms_norm(mlp, x, norm, f"{layer}.next", eps)
    flat = g.reshape(g.rows_from(h, 1, "masks"), [-1, dims.hidden_size], "hidden")
    logits = g.head(flat, _head(dims, target_weights, "", target_tied), "flat_logits")
    logits = g.reshape(logits, [-1, block - 1, dims.vocab_size], "logits")
    candidates = min(max(limits.max_tree_budget, 1), dims.vocab_size)
    k = g.most_probable(logits, candidates, (names.LOG_PROBS, names.CANDIDATES))
    g.output(names.LOG_PROBS, "float32", ["N", block - 1, k])
    g.output(names.CANDIDATES, g.integers, ["N", block - 1, k])
    return g.model()
