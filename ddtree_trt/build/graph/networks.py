"""Decoders as ONNX graphs, built by hand: the parts of every network, and the target.

Each is written once, in the methods of `ops.Graph`, for every runtime. Weights are read by their Hugging Face names
and written to the graph's sink one by one, so that building needs little more memory than the largest tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto

from ddtree_trt.artifact import tensors as names
from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.build.checkpoint.reader import Checkpoint
from ddtree_trt.build.checkpoint.scales import join_scales
from ddtree_trt.build.graph.ops import Attention, Delta, Fine, Graph, Table
from ddtree_trt.build.graph.rotation import Rotation, Weights, rotate, rotation_matrix
from ddtree_trt.drafters.tapped import BODY as DRAFTER_BODY
from ddtree_trt.drafters.tapped import FC, OWN_EMBEDDING, OWN_HEAD, TO_TARGET
from ddtree_trt.models.decoder import BODY, EMBEDDING, HEAD, MLP, Part, TransformerDims, decoder_layers, final_norm
from ddtree_trt.models.rotary import rotary_tables


@dataclass(eq=False)
class Network:
    """The common parts of the target and the drafter: layers, caches, rotary tables."""

    g: Graph
    dims: TransformerDims
    weights: Weights
    limits: Limits
    prefix: str  # of weights in the graph, before their Hugging Face names
    body: str = BODY  # prefix of layers in the checkpoint
    quantized: Checkpoint | None = None

    def __post_init__(self) -> None:
        dims, limits = self.dims, self.limits
        self.layers = decoder_layers(dims, self.body)
        rotary, half = (dims.rotated, dims.rope_theta, limits.cache_rows, dims.rope_scaling), dims.rotated // 2
        key = f"{self.prefix}rotary.{half}.{dims.rope_theta:g}"
        cos = self.g.weight(f"{key}.cos", lambda: rotary_tables(*rotary)[0], "float32")
        sin = self.g.weight(f"{key}.sin", lambda: rotary_tables(*rotary)[1], "float32")
        self.rotary = (cos, sin)
        self.g.cache(dims, limits)

    def joined(self, *sources: str) -> np.ndarray:
        """One or several projections side by side [in, out], by their Hugging Face names."""
        return np.ascontiguousarray(np.concatenate([self.weights(s) for s in sources], axis=0).T)

    def stacked(self, part: Part) -> np.ndarray:
        """The projections of all experts [E, out, in]; gate and up are one after the other."""
        assert self.dims.experts is not None
        count = self.dims.experts.count
        return np.concatenate([self.weights(s) for s in part.sources]).reshape(count, -1, part.shape[-1])

    def linear(self, x: str, name: str, *sources: str, out: str, gated: int = 0, fine: Fine | None = None) -> str:
        """x [..., in] times one or several projections side by side, by their Hugging Face names. Quantised projections
        are multiplied as they are stored, and one by one where no single product can replace theirs (see
        `join_scales`)."""
        quantized = self.quantized
        each = [quantized.scales(source) if quantized else None for source in sources]
        found = [scales for scales in each if scales is not None]
        if quantized is None or not found:
            return self.g.linear(x, self.prefix + name, lambda: self.joined(*sources), out, gated, fine)
        if gated:
            x = self.g.gated_unit(x, gated, out)
        shared = join_scales(found) if len(found) == len(sources) else None
        if shared is None:
            parts = [self.linear(x, source, source, out=f"{source}.out") for source in sources]
            return self.g.concat(parts, out, axis=-1)

        def stored() -> np.ndarray:
            # Transposed, bytes that hold two rows of a column each are ONNX's packing of [in, out].
            return np.ascontiguousarray(np.concatenate([quantized.stored(s) for s in sources], axis=0).T)

        return self.g.linear_quantized(x, self.g.weight(self.prefix + name, stored, shared.values), shared, out)

    def norm(self, part: Part) -> str:
        (name,) = part.sources
        return self.g.weight(self.prefix + name, lambda: self.weights(name), "float32")

    def name(self, index: int) -> str:
        return f"{self.body}layers.{index}"

    def cached(self, index: int) -> Attention:
        d = self.dims
        place = d.attention_layers.index(index)
        return Attention(place, self.rotary, (d.num_heads, d.num_kv_heads), d.head_dim, d.rotated)

    def mixed(self, index: int, h: str) -> str:
        """What layer `index` makes of rows h [N, T, H] and those they see, before `project`: by its attention, whose
        output a hybrid gates, or by its delta net."""
        g, layer = self.g, self.name(index)
        if index not in self.dims.attention_layers:
            return self.delta_net(index, h)
        seen = g.attention(self.qkv(index, h), self.cached(index), f"{layer}.attn")
        return g.gated(seen, f"{layer}.attn.gate", f"{layer}.attn.gated") if self.dims.delta else seen

    def delta_net(self, index: int, h: str) -> str:
        """The gated delta net of layer `index` over rows h [N, T, H]: [N, T, Hv · Dv]."""
        g, d, parts, layer = self.g, self.dims, self.layers[index], self.name(index)
        assert d.delta is not None, "a network of attention alone has no other layers"

        def weight(part: Part | None, order: Callable[[np.ndarray], np.ndarray] = np.asarray) -> str:
            assert part is not None, "every delta net has these parts"
            (source,) = part.sources
            return g.weight(self.prefix + source, lambda: order(self.weights(source)), "float32")

        conv = weight(parts.conv, lambda values: np.ascontiguousarray(values.T))
        decay, bias, norm = (weight(part) for part in (parts.decay, parts.step_bias, parts.head_norm))
        at = Delta(d.delta_layers.index(index), d.delta, conv, decay, bias, norm, d.rms_norm_eps)
        projected = self.linear(h, f"{layer}.qkv", *parts.qkv.sources, out=f"{layer}.qkv.out")
        return g.delta_net(projected, at, f"{layer}.delta")

    def qkv(self, index: int, h: str) -> tuple[str, str, str]:
        """Queries, keys and values [N, rows, heads · D] of rows h [N, rows, H], before rotary embedding; of a hybrid
        also `attn.gate` [N, rows, Hq · D]."""
        g, d, parts, layer = self.g, self.dims, self.layers[index], self.name(index)
        # Of a product with errors, those in values cost the most.
        *others, values = widths = d.projected_widths
        fine = (sum(others), values)
        qkv = self.linear(h, f"{layer}.qkv", *parts.qkv.sources, out=f"{layer}.qkv.out", fine=fine)
        if bias := parts.qkv_bias:
            key = f"{self.prefix}{layer}.{bias.name}"
            qkv = g.op("Add", [qkv, g.weight(key, lambda: self.joined(*bias.sources))], [f"{layer}.qkv.biased"])
        q, k, v = (f"{layer}.{p}" for p in "qkv")
        g.split(qkv, widths, [q, f"{layer}.attn.gate", k, v] if d.delta else [q, k, v])
        return self.head_norm(parts.q_norm, q, d.num_heads), self.head_norm(parts.k_norm, k, d.num_kv_heads), v

    def head_norm(self, part: Part | None, x: str, heads: int) -> str:
        """RMS norm of every head of x [N, rows, heads · D]; x itself where the family has none."""
        g, d = self.g, self.dims
        if part is None:
            return x
        split = g.reshape(x, [0, 0, heads, d.head_dim], f"{x}.heads")
        normed = g.rms_norm(split, self.norm(part), f"{x}.normed", d.rms_norm_eps)
        return g.reshape(normed, [0, 0, heads * d.head_dim], f"{x}.flat")

    def project(self, index: int, attn: str) -> str:
        """The output [N, T, H] of layer `index`'s attention, from what its heads saw, attn [N, T, Hq · D]."""
        layer = self.name(index)
        return self.linear(attn, f"{layer}.o", *self.layers[index].o.sources, out=f"{layer}.o.out")

    def around(self, index: int, place: str, h: str, sublayer: Callable[[str], str]) -> str:
        """The sublayer of layer `index` over rows h [N, T, H]. A drafter may have a convolution at that place."""
        return sublayer(h)

    def after_attention(self, index: int, projected: str, x: str) -> tuple[str, str]:
        """The rest of layer `index`, from the output [N, T, H] of its attention and the residual stream x [N, T, H]:
        the next layer's normed input and the residual stream."""
        parts, layer, eps = self.layers[index], self.name(index), self.dims.rms_norm_eps
        h, x = self.g.add_rms_norm(projected, x, self.norm(parts.post_norm), f"{layer}.post", eps)
        inner = self.around(index, MLP, h, partial(self.mlp, index))
        following = [*(each.input_norm for each in self.layers[index + 1 :]), final_norm(self.dims, self.body)]
        return self.g.add_rms_norm(inner, x, self.norm(following[0]), f"{layer}.next", eps)

    def mlp(self, index: int, h: str) -> str:
        """SwiGLU of rows h [N, T, H], or that of the experts they choose."""
        g, width, parts, layer = self.g, self.dims.intermediate_size, self.layers[index], self.name(index)
        if parts.router is not None and self.dims.experts is not None:
            key = f"{self.prefix}{layer}"
            chosen = self.linear(h, f"{layer}.router", *parts.router.sources, out=f"{layer}.router.out")
            projections = (partial(self.stacked, parts.gate_up), partial(self.stacked, parts.down))
            if parts.shared_gate_up is None or parts.shared_down is None or parts.shared_gate is None:
                return g.experts(h, chosen, key, projections, self.dims.experts, f"{layer}.mlp")
            mixture = g.experts(h, chosen, key, projections, self.dims.experts, f"{layer}.experts")
            width = self.dims.experts.shared
            shared = self.swiglu(f"{layer}.shared", h, parts.shared_gate_up, parts.shared_down, width)
            name = f"{layer}.shared_gate"
            gate = self.linear(h, name, *parts.shared_gate.sources, out=f"{name}.out")
            return g.op("Add", [mixture, g.gated(shared, gate, f"{layer}.shared.gated")], [f"{layer}.mlp"])
        return self.swiglu(layer, h, parts.gate_up, parts.down, width, f"{layer}.mlp")

    def swiglu(self, name: str, h: str, gate_up: Part, down: Part, width: int, out: str = "") -> str:
        """One SwiGLU of that width over rows h [N, T, H]."""
        both = self.linear(h, f"{name}.gate_up", *gate_up.sources, out=f"{name}.gate_up.out")
        return self.linear(both, f"{name}.down", *down.sources, out=out or f"{name}.mlp", gated=width)


def embedding_table(network: Checkpoint, prefix: str) -> Table:
    return Table(names.EMBEDDING, f"{prefix}{EMBEDDING}", lambda: network.tensor(EMBEDDING), network.dims.table)


def head_table(g: Graph, network: Checkpoint, prefix: str) -> Table:
    """The language-model head, the embedding itself when tied; for rotated rows in a graph that rotates."""
    tied, dims = network.tie_word_embeddings, network.dims
    source, key = (EMBEDDING, f"{prefix}{EMBEDDING}") if tied else (HEAD, f"{prefix}lm_head")
    if g.rotates:
        return Table(names.HEAD, f"{key}.head", lambda: rotate(network.tensor(source), dims.hidden_size), dims.table)
    return Table(names.EMBEDDING if tied else names.HEAD, key, lambda: network.tensor(source), dims.table)


def build_target_graph(
    g: Graph, network: Checkpoint, limits: Limits, taps: Sequence[int] = (), prefix: str = "", quantized: bool = False
) -> ModelProto:
    """The target: T tokens of N slots after their caches → logits of R rows, tapped hidden states, and where the logits
    stay on a device, the choices.

    A chain under a causal mask is a prefill, a tree under an ancestor-only mask a verification; the graph is the same.
    Without taps it is a plain language model (an autoregressive drafter); `prefix` keeps its weights apart. In a graph
    that rotates, tapped states are rotated.
    Unless `quantized` quantised weights are dequantised, and no row is rounded.
    """
    dims = network.dims
    token_ids = g.input(names.TOKEN_IDS, g.integers, ["N", "T"])
    g.row_inputs("T", limits.max_tokens_per_pass, masked=True)
    rows = g.input(names.ROWS, g.integers, ["R"])
    rotation = Rotation(dims, network.tensor) if g.rotates else None
    stored = network if quantized else None
    net = Network(g, dims, rotation or network.tensor, limits, prefix, quantized=stored)
    eps = dims.rms_norm_eps

    x = g.embed(embedding_table(network, prefix), token_ids, "embedded")
    if rotation:
        x = g.row_product(x, g.weight(f"{prefix}rotation.into", rotation.into), "rotated")
    h = g.rms_norm(x, net.norm(net.layers[0].input_norm), "layers.0.input", eps)
    tapped = []
    for i in range(dims.num_layers):
        h, x = net.after_attention(i, net.project(i, net.mixed(i, h)), x)
        if i in taps:
            tapped.append(x)
    if tapped:
        g.concat(tapped, names.TAPS, axis=-1)
        g.output(names.TAPS, g.floats, ["N", "T", len(tapped) * dims.hidden_size])
    flat = g.reshape(h, [-1, dims.hidden_size], "hidden")
    wanted = g.op("Gather", [flat, rows], ["wanted"], axis=0)
    if rotation:
        wanted = g.row_product(wanted, g.weight(f"{prefix}rotation.out", rotation.out), "wanted.head")
    g.head(wanted, head_table(g, network, prefix), names.LOGITS)
    g.output(names.LOGITS, "float32", ["R", dims.vocab_size])
    g.choices(names.LOGITS)
    return g.model()


DRAFT_IDS = "draft_ids"  # ids of a vocabulary of the drafter's own


class TappedNetwork(Network):
    """Layers, tables and fusion of a drafter, whose tables may be its target's."""

    dims: Any

    def __init__(self, g: Graph, drafter: Checkpoint, target: Checkpoint, limits: Limits) -> None:
        super().__init__(g, drafter.dims, drafter.tensor, limits, names.DRAFTER, DRAFTER_BODY)
        self._target = target

    def embedding(self) -> Table:
        if not self.dims.own_embedding:
            return embedding_table(self._target, "")
        key = self.prefix + OWN_EMBEDDING
        return Table(names.EMBEDDING, key, lambda: self.weights(OWN_EMBEDDING), self.dims.table)

    def fused(self, taps: str) -> str:
        """Tapped states [N, C, M·H] in the drafter's width. The product is never rounded: all that the drafter knows
        of the context passes through it."""

        def fc() -> np.ndarray:
            weight = self.weights(FC)
            size = self.dims.taps_width // len(self.dims.tap_layers)
            return np.ascontiguousarray((rotate(weight, size) if self.g.rotates else weight).T)

        return self.g.product(taps, self.g.weight(f"{self.prefix}fc", fc), "fc.out")

    def logits(self, rows: str, out: str) -> str:
        """Logits [R, V'] of normed rows [R, H]: by its own head, or the target's."""
        g, dims = self.g, self.dims
        if not dims.own_head:
            head = head_table(g, self._target, "")
        else:

            def own() -> np.ndarray:
                weight = self.weights(OWN_HEAD)
                return rotate(weight, dims.hidden_size) if g.rotates else weight

            head = Table(names.HEAD, self.prefix + OWN_HEAD, own, (dims.head_size, dims.hidden_size))
        if g.rotates:
            into = g.weight("rotation.into", lambda: rotation_matrix(dims.hidden_size))
            rows = g.product(rows, into, "hidden.head")
        return g.head(rows, head, out)

    @property
    def ids(self) -> str:
        """The name of the head's ids, which are the target's unless `add_target_ids` maps them."""
        return names.CANDIDATES if self.dims.draft_vocab_size is None else DRAFT_IDS

    def add_target_ids(self) -> None:
        """Compute the target's ids of the head's ids, where they differ."""
        if self.dims.draft_vocab_size is None:
            return
        g = self.g

        def target_ids() -> np.ndarray:
            offsets = np.rint(self.weights(TO_TARGET)).astype(np.int64)
            return (np.arange(len(offsets)) + offsets).astype(g.integers)

        ids = g.weight(f"{self.prefix}to_target", target_ids, g.integers)
        g.op("Gather", [ids, DRAFT_IDS], [names.CANDIDATES], axis=0)

    def add_most_probable(self, logits: str, *shape: int | str) -> None:
        """Add the outputs `log_probs` and `candidates` [..., K] of logits [..., V'], of these first dimensions."""
        g = self.g
        most = min(max(self.limits.max_tree_budget, 1), self.dims.head_size)
        k = g.most_probable(logits, most, (names.LOG_PROBS, self.ids))
        self.add_target_ids()
        g.output(names.LOG_PROBS, "float32", [*shape, k])
        g.output(names.CANDIDATES, g.integers, [*shape, k])
