"""The two networks, built by hand as ONNX graphs: the target and the DFlash drafter.

Both are written once, in the verbs of `ops.Graph`. Weights are asked for by their Hugging Face names and go to the
sink one by one, so that building needs little more memory than the largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import ModelProto

from ddtree_trt import tensors as names
from ddtree_trt.artifact import DrafterDims, Limits, TransformerDims
from ddtree_trt.build.ops import Attention, Graph, Sink

Weights = Callable[[str], np.ndarray]  # Hugging Face tensor name → float32 array


def rotary_tables(dims: TransformerDims, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine [rows, D/2] of the rotary embedding, computed in float64 and rounded once."""
    inverse = dims.rope_theta ** (-np.arange(0, dims.head_dim, 2, dtype=np.float64) / dims.head_dim)
    angles = np.outer(np.arange(rows, dtype=np.float64), inverse)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class _Network:
    """What the target and the drafter have in common: their layers, their caches, their rotary tables."""

    def __init__(self, graph: Graph, dims: TransformerDims, weights: Weights, limits: Limits, prefix: str) -> None:
        self.g, self.dims, self.weights, self.prefix = graph, dims, weights, prefix
        rows, half = limits.cache_rows, dims.head_dim // 2
        key = f"{prefix}rotary.{half}.{dims.rope_theta:g}"
        cos = graph.weight(f"{key}.cos", lambda: rotary_tables(dims, rows)[0])
        sin = graph.weight(f"{key}.sin", lambda: rotary_tables(dims, rows)[1])
        self.rotary = (cos, sin)
        shape: list[int | str] = ["N", dims.num_kv_heads, rows, dims.head_dim]
        past = [graph.input(n, "float32", shape) for n in names.past_names(dims.num_layers)]
        present = names.present_names(dims.num_layers)
        for name in present:
            graph.output(name, "float32", shape)
        self.past = list(zip(past[::2], past[1::2], strict=True))
        self.present = list(zip(present[::2], present[1::2], strict=True))

    def weight(self, name: str, *sources: str, transpose: bool = True) -> str:
        """One or several projections side by side, stored as [in, out]; norms are stored as they are."""

        def make() -> np.ndarray:
            array = np.concatenate([self.weights(s) for s in sources], axis=0)
            return np.ascontiguousarray(array.T) if transpose else array

        return self.g.weight(self.prefix + name, make)

    def norm(self, name: str) -> str:
        return self.weight(name, name, transpose=False)

    def place(self, index: int, control: tuple[str, str, str]) -> Attention:
        """Where layer `index` attends; control is (seqlens_k, total_length, positions)."""
        heads = self.dims.num_heads, self.dims.num_kv_heads
        return Attention(self.past[index], self.present[index], *control, self.rotary, heads)

    def qkv(self, layer: str, h: str) -> tuple[str, str, str]:
        """Queries, keys and values [N, rows, heads · D] of rows h [N, rows, H], heads normed."""
        g, d = self.g, self.dims
        sources = [f"{layer}.self_attn.{p}_proj.weight" for p in "qkv"]
        qkv = g.linear(h, self.weight(f"{layer}.qkv", *sources), f"{layer}.qkv.out")
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
        both = g.linear(h, self.weight(f"{layer}.gate_up", *sources), f"{layer}.gate_up.out")
        gate, up = g.split(both, [width, width], [f"{layer}.gate", f"{layer}.up"])
        inner = g.swiglu(gate, up, f"{layer}.swiglu")
        return g.linear(inner, self.weight(f"{layer}.down", f"{layer}.mlp.down_proj.weight"), f"{layer}.mlp")

    def project(self, layer: str, attn: str) -> str:
        return self.g.linear(attn, self.weight(f"{layer}.o", f"{layer}.self_attn.o_proj.weight"), f"{layer}.o.out")


def _control(g: Graph, positions: str) -> tuple[str, str, str]:
    seqlens = g.input(names.SEQLENS_K, "int32", ["N"])
    total = g.input(names.TOTAL_LENGTH, "int32", [])
    return seqlens, total, g.input(names.POSITIONS, "int64", ["N", positions])


def _embedding(g: Graph, weights: Weights, prefix: str) -> str:
    name = "model.embed_tokens.weight"
    return g.weight(prefix + name, lambda: weights(name))


def _head(g: Graph, weights: Weights, prefix: str, tied: bool) -> str:
    """The language-model head [V, H]: the embedding itself when tied."""
    return _embedding(g, weights, prefix) if tied else g.weight(f"{prefix}lm_head", lambda: weights("lm_head.weight"))


def build_target_graph(
    dims: TransformerDims,
    weights: Weights,
    sink: Sink,
    *,
    tap_layers: tuple[int, ...],
    limits: Limits,
    tied: bool,
    prefix: str = "",
) -> ModelProto:
    """The target: T tokens of N slots on top of their caches → choices, logits of R rows, tapped hidden states.

    A chain with a causal bias is a prefill, a tree with an ancestor-only bias is a verification; the graph is the same.
    With no tap_layers it is a plain language model (an autoregressive drafter); `prefix` keeps its weights apart.
    """
    g = Graph("target", sink)
    token_ids = g.input(names.TOKEN_IDS, "int64", ["N", "T"])
    control = _control(g, "T")
    bias = g.input(names.ATTENTION_BIAS, "float32", ["N", 1, "T", "W"])
    rows = g.input(names.ROWS, "int64", ["R"])
    net = _Network(g, dims, weights, limits, prefix)
    eps = dims.rms_norm_eps

    x = g.embed(_embedding(g, weights, prefix), token_ids, "embedded")
    h = g.rms_norm(x, net.norm("model.layers.0.input_layernorm.weight"), "layers.0.input", eps)
    taps = []
    for i in range(dims.num_layers):
        layer = f"model.layers.{i}"
        attn = g.attention(net.qkv(layer, h), net.place(i, control), bias, f"{layer}.attn")
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
        g.output(names.TAPS, "float32", ["N", "T", len(taps) * dims.hidden_size])
    flat = g.reshape(h, [-1, dims.hidden_size], "hidden")
    wanted = g.op("Gather", [flat, rows], ["wanted"], axis=0)
    g.head(wanted, _head(g, weights, prefix, tied), names.LOGITS)
    g.output(names.LOGITS, "float32", ["R", dims.vocab_size])
    g.op("ArgMax", [names.LOGITS], [names.CHOICES], axis=1, keepdims=0)
    g.output(names.CHOICES, "int64", ["R"])
    return g.model()


def build_drafter_graph(
    dims: DrafterDims,
    weights: Weights,
    sink: Sink,
    *,
    target_weights: Weights,
    target_tied: bool,
    limits: Limits,
    always_causal: bool,
) -> ModelProto:
    """The DFlash drafter: C new context rows and one block [bonus, MASK × L] → top-K log-probabilities per position.

    Context rows are the tapped target states of committed tokens, projected by `fc` and normed; every layer appends
    their keys and values, then the block's, and the block attends to all of them without a mask. The next call starts
    at the end of the context and overwrites the block's rows. The context rows pass through the fused projection with
    the block, which costs their queries and saves a second matrix product per layer; those outputs are dropped.
    Embedding and language-model head are the target's.
    """
    g = Graph("drafter", sink, always_causal=always_causal)
    block, eps = dims.block_size, dims.rms_norm_eps
    taps = g.input(names.TAPS, "float32", ["N", "C", len(dims.tap_layers) * dims.hidden_size])
    token_ids = g.input(names.TOKEN_IDS, "int64", ["N", block])
    control = _control(g, "C+block")
    top_k = g.input(names.TOP_K, "int64", [1])
    net = _Network(g, dims, weights, limits, "drafter.")

    projected = g.linear(taps, net.weight("fc", "fc.weight"), "fc.out")
    context = g.rms_norm(projected, net.norm("hidden_norm.weight"), "context", eps)
    x = g.embed(_embedding(g, target_weights, ""), token_ids, "embedded")
    h = g.rms_norm(x, net.norm("layers.0.input_layernorm.weight"), "layers.0.input", eps)
    for i in range(dims.num_layers):
        layer = f"layers.{i}"
        rows = g.concat([context, h], f"{layer}.rows", axis=1)
        attn = g.block_attention(net.qkv(layer, rows), net.place(i, control), block, f"{layer}.attn")
        attn = net.project(layer, attn)
        h, x = g.add_rms_norm(attn, x, net.norm(f"{layer}.post_attention_layernorm.weight"), f"{layer}.post", eps)
        mlp = net.mlp(layer, h)
        last = i + 1 == dims.num_layers
        norm = net.norm("norm.weight" if last else f"layers.{i + 1}.input_layernorm.weight")
        h, x = g.add_rms_norm(mlp, x, norm, f"{layer}.next", eps)
    flat = g.reshape(g.rows_from(h, 1, "masks"), [-1, dims.hidden_size], "hidden")
    logits = g.head(flat, _head(g, target_weights, "", target_tied), "flat_logits")
    logits = g.reshape(logits, [-1, block - 1, dims.vocab_size], "logits")
    log_probs = g.op("LogSoftmax", [logits], ["all_log_probs"], axis=-1)
    g.op("TopK", [log_probs, top_k], [names.LOG_PROBS, names.CANDIDATES], axis=-1, largest=1, sorted=1)
    g.output(names.LOG_PROBS, "float32", ["N", block - 1, "K"])
    g.output(names.CANDIDATES, "int64", ["N", block - 1, "K"])
    return g.model()
