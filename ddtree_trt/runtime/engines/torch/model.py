"""Networks in PyTorch: the layers of all, and language models.

Everything is a function of tensors of fixed shape, the committed lengths included, so that a pass can be captured into
a CUDA graph once and replayed at any length. Rows behind the real ones are padding: they see themselves only, write
their keys and values behind those of the real rows, and their outputs are not read.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ddtree_trt.artifact.weight_layout import DRAFTER
from ddtree_trt.models import decoder
from ddtree_trt.models.decoder import ATTENTION, MLP, BlockMask, Experts, Part, TransformerDims, decoder_layers
from ddtree_trt.plugins import MaskMode
from ddtree_trt.runtime.engines.base import VerifyRequest
from ddtree_trt.runtime.engines.torch.attention import Attention, DeviceCache, Place
from ddtree_trt.runtime.engines.torch.delta import Ancestors, delta_net
from ddtree_trt.runtime.engines.torch.graphs import Graphs
from ddtree_trt.runtime.engines.torch.parallel.split import ALONE, Shard, Vocabulary
from ddtree_trt.runtime.engines.torch.pointwise import math_for, rotary_tables
from ddtree_trt.runtime.engines.torch.products import PYTORCH, FixedOrder, Normed, Products, ready_head

Weights = Mapping[str, Any]  # tensors; matrices of products may be `Scaled`
Layer = decoder.Layer[Tensor]  # `Weights` says which may be no tensors
Sublayer = Callable[[Tensor], Tensor]
# (layer, ATTENTION or MLP, rows h [N, T, H], the sublayer) → what stands in the sublayer's place
Around = Callable[[int, str, Tensor, Sublayer], Tensor]


class Decoder:
    """The layers of one network, with their cache and rotary tables."""

    def __init__(
        self, dims: TransformerDims, weights: Weights, prefix: str, cache: DeviceCache, attention: Attention,
        around: Around | None = None, shard: Shard = ALONE, products: Products = PYTORCH,
    ) -> None:  # fmt: skip
        """`dims` and weights are those of the shard. `around` is called in the place of each sublayer."""
        self._shard = shard
        self._product = products
        self.dims = dims
        self.cache = cache
        self.attention = attention
        self._around = around or (lambda index, place, h, sublayer: sublayer(h))
        self.math = math_for(attention.kernels, dims)
        self.layers = [_layer(weights, prefix, i, parts) for i, parts in enumerate(decoder_layers(dims))]
        self.norm = weights[f"{prefix}norm"]
        norms = [self.norm, *(norm for each in self.layers for norm in (each.input_norm, each.post_norm))]
        plain = dims.experts is None and dims.delta is None and around is None and shard.size == 1
        self._adding = products if plain and isinstance(products, FixedOrder) and products.adds(norms) else None
        self.tables = rotary_tables(dims, cache.rows, cache.slab.device)
        self.scale = dims.head_dim**-0.5

    def attend(self, index: int, h: Tensor, positions: Tensor, place: Place, mode: MaskMode, window: int = 0) -> Tensor:
        """Attention of layer `index` over rows h [N, T, H], whose keys and values go into the cache: [N, T, H]."""
        layer = self.layers[index]
        seen = self.heads(index, self._product(h, layer.qkv, layer.qkv_bias), positions, place, mode, window)
        return self._shard.all_reduce(self._product(seen, layer.o))

    def heads(
        self, index: int, projected: Tensor, positions: Tensor, place: Place, mode: MaskMode, window: int
    ) -> Tensor:
        """The heads' outputs [N, T, Hq·D] for the fused projection's."""
        d, layer = self.dims, self.layers[index]
        gates = None
        if d.delta is not None:
            query, gates, *others = projected.split(d.projected_widths, -1)
            projected = torch.cat((query, *others), -1)
        q, k, v = self.math.split_qkv(
            projected, layer.q_norm, layer.k_norm, self.tables, positions, d.rms_norm_eps, (d.num_heads, d.num_kv_heads)
        )
        seen = self.attention(q, k, v, *self.cache.layer(index), place, mode, self.scale, window).flatten(2)
        return seen if gates is None else seen * gates.sigmoid()

    def recur(self, index: int, h: Tensor, slots: Tensor, ancestors: Ancestors) -> Tensor:
        """The gated delta net of layer `index` over rows h [N, T, H] of these slots: [N, T, H]."""
        layer, d, states = self.layers[index], self.dims, self.cache.states
        assert d.delta is not None and states is not None, "a hybrid has a cache with states"
        parts = tuple(part for part in (layer.conv, layer.decay, layer.step_bias, layer.head_norm) if part is not None)
        before = states.of_pass(index, slots, h.shape[1], of_tree=ancestors.of_tree)
        found = delta_net(self._product(h, layer.qkv), d.delta, parts, d.rms_norm_eps, ancestors, *before)
        return self._product(found.to(h.dtype), layer.o)

    def mlp(self, layer: Layer, h: Tensor) -> Tensor:
        """SwiGLU of rows h [N, T, H], or that of the experts they choose: [N, T, H]."""
        if layer.router is not None and self.dims.experts is not None:
            weights = layer.router, layer.gate_up, layer.down
            mixed = mixture(h, *weights, self.dims.experts, self.math.swiglu)
            if layer.shared_gate_up is not None and layer.shared_down is not None and layer.shared_gate is not None:
                gated = self._product.swiglu(h, layer.shared_gate_up, self.math.swiglu)
                shared = self._product(gated, layer.shared_down)
                mixed = mixed + self._product(h, layer.shared_gate).sigmoid() * shared
            return self._shard.all_reduce(mixed)
        inner = self._product.swiglu(h, layer.gate_up, self.math.swiglu)
        return self._shard.all_reduce(self._product(inner, layer.down))

    def run(
        self, x: Tensor, positions: Tensor, place: Place, mode: MaskMode, taps: tuple[int, ...] = (),
        masks: Sequence[BlockMask] = (),
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Rows x [N, T, H] at positions int32 [N, T] through all layers: the normed hidden states [N, T, H] and the
        tapped layers' outputs. `masks`, where given, replace the mode, one for each layer."""
        eps, tapped = self.dims.rms_norm_eps, []
        update: Tensor | None = None  # the MLP's output, added to x by the next norm
        if self._adding is not None:
            return self._run_adding(self._adding, x, positions, place, mode, taps, masks)
        hybrid = {*self.dims.delta_layers}
        ancestors = _ancestors(place, mode, x.shape[1]) if hybrid else None
        for i, layer in enumerate(self.layers):
            x, h = self.math.add_norm(x, update, layer.input_norm, eps)
            if i - 1 in taps:
                tapped.append(x)
            seen, window = _mode(masks[i]) if masks else (mode, 0)
            attend = partial(self.attend, i, positions=positions, place=place, mode=seen, window=window)
            if ancestors is not None and i in hybrid:
                attend = partial(self.recur, i, slots=place.slots, ancestors=ancestors)
            x, h = self.math.add_norm(x, self._around(i, ATTENTION, h, attend), layer.post_norm, eps)
            update = self._around(i, MLP, h, partial(self.mlp, layer))
        x, h = self.math.add_norm(x, update, self.norm, eps)
        if len(self.layers) - 1 in taps:
            tapped.append(x)
        return h, tapped

    def _run_adding(
        self, product: FixedOrder, x: Tensor, positions: Tensor, place: Place, mode: MaskMode, taps: tuple[int, ...],
        masks: Sequence[BlockMask],
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """The same with sums and norms in the products: the first norm and the last are operations of their own."""
        eps, layers, tapped = self.dims.rms_norm_eps, self.layers, []
        h: Tensor | Normed = self.math.add_norm(x, None, layers[0].input_norm, eps)[1]
        for i, layer in enumerate(layers):
            seen, window = _mode(masks[i]) if masks else (mode, 0)
            heads = self.heads(i, product(h, layer.qkv, layer.qkv_bias), positions, place, seen, window)
            x, h = product.add(heads, layer.o, x, layer.post_norm, eps)
            following = layers[i + 1].input_norm if i + 1 < len(layers) else self.norm
            x, h = product.add(product.swiglu(h, layer.gate_up, self.math.swiglu), layer.down, x, following, eps)
            if i in taps:
                tapped.append(x)
        return self.math.add_norm(x, None, self.norm, eps)[1], tapped


def _mode(mask: BlockMask) -> tuple[MaskMode, int]:
    """The mode and the window of an attention under that mask."""
    return MaskMode.CAUSAL if mask.causal else MaskMode.NONE, mask.window


def _ancestors(place: Place, mode: MaskMode, tokens: int) -> Ancestors:
    """Of the rows of a pass over trees or, in another mode, chains."""
    if mode is not MaskMode.TREE:
        return Ancestors.of_chains(len(place.slots), tokens, place.slots.device)
    assert place.mask is not None and place.parents is not None, "a hybrid's tree has a mask and parents"
    return Ancestors.of_trees(place.mask, place.parents)


def _layer(weights: Weights, prefix: str, index: int, parts: Iterable[Part]) -> Layer:
    """The weights of layer `index`. A part may be stored in one tensor [layers, …] for all layers."""

    def find(name: str) -> Tensor:
        stacked = weights.get(f"{prefix}{name}")
        return weights[f"{prefix}layers.{index}.{name}"] if stacked is None else stacked[index]

    return Layer(**{part.name: find(part.name) for part in parts})


def target_ids(weights: Weights) -> Tensor | None:
    """The target's ids int32 [V'] of a drafter's own ids; None where they are the same."""
    offsets = weights.get(f"{DRAFTER}to_target")
    return None if offsets is None else offsets + torch.arange(len(offsets), device=offsets.device)


class LanguageModel:
    """A target, or an autoregressive drafter: tokens in, logits and tapped states out."""

    def __init__(
        self, dims: TransformerDims, weights: Weights, prefix: str, cache: DeviceCache, attention: Attention,
        taps: tuple[int, ...] = (), shard: Shard = ALONE, products: Products = PYTORCH,
    ) -> None:  # fmt: skip
        """`dims` and weights are those of the shard, apart from `vocab_size`."""
        self.dims = dims
        self.cache = cache
        self.taps = taps
        self.vocabulary = Vocabulary(dims.vocab_size, shard)
        self.embedding = weights[f"{prefix}embedding"]
        self.head = ready_head(weights.get(f"{prefix}head", self.embedding))
        self._decoder = Decoder(dims, weights, prefix, cache, attention, shard=shard, products=products)
        self.product = products

    def embed(self, token_ids: Tensor) -> Tensor:
        """The embeddings [..., H] of token_ids int [...]."""
        return self.vocabulary.embed(token_ids, self.embedding)

    def forward(
        self, token_ids: Tensor, positions: Tensor, place: Place, mode: MaskMode
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [N, T, H] of token_ids int [N, T] and, where layers are tapped, their outputs [N, T, M·H]."""
        x = self.embed(token_ids)
        hidden, tapped = self._decoder.run(x, positions, place, mode, self.taps)
        return hidden, torch.cat(tapped, -1) if tapped else None

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """float32 [R, V] of hidden states [R, H]; V is the shard's part of the vocabulary."""
        return self.product.logits(hidden, self.head, out)

    def extend(self, chains: Sequence[VerifyRequest]) -> list[NDArray[np.float32]]:
        """See `drafters.LanguageModel`. Passes are padded to the longest chain."""
        place, ids, positions = self.cache.place(chains)
        hidden, _ = self.forward(ids, positions, place, MaskMode.TREE)
        logits = self.logits(torch.stack([h[len(c.tree) - 1] for h, c in zip(hidden, chains, strict=True)]))
        for chain in chains:
            self.cache.append(chain.slot, len(chain.tree))
        return list(logits.cpu().numpy())


@dataclass(frozen=True)
class DrafterParts:
    """What the engine gives to a drafter of any kind."""

    weights: Weights
    target: LanguageModel
    cache: DeviceCache  # its own
    attention: Attention  # likewise
    graphs: Graphs
    products: Products = PYTORCH


Swiglu = Callable[[Tensor], Tensor]  # [1, rows, 2·inner] → [1, rows, inner]
# A product of rows [rows, in], grouped by expert, with weights [E, in, out]; `offs` int32 [E] are the ends of groups.
_grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm


def route(h: Tensor, router: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Weights [R, K], falling, and experts int64 [R, K] of rows h [R, H]: of a float32 softmax over all experts."""
    weights, chosen = F.linear(h, router).softmax(-1, dtype=torch.float32).topk(experts.per_token, -1)
    if experts.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(h.dtype), chosen


def mixture(h: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, experts: Experts, swiglu: Swiglu) -> Tensor:
    """The mixture over rows h [N, T, H]; router [E, H], gate_up [E·2·inner, H] and down [E·H, inner]."""
    rows = h.flatten(0, 1)
    weights, chosen = route(rows, router, experts)
    both, back = (part.unflatten(0, (experts.count, -1)).transpose(1, 2) for part in (gate_up, down))
    mix = mix_grouped if has_grouped_products(h) else mix_all
    return mix(rows, weights, chosen, both, back, swiglu).view_as(h)


def has_grouped_products(h: Tensor) -> bool:
    """Whether products by group have a kernel. On GPUs before Hopper, and in other types than bf16, PyTorch has a loop,
    which waits for the host and cannot be captured."""
    if not h.is_cuda:
        return True
    return h.dtype == torch.bfloat16 and torch.cuda.get_device_capability(h.device) >= (9, 0)


def mix_grouped(h: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, swiglu: Swiglu) -> Tensor:
    """Rows h [R, H] through the experts they chose, [R, K] of each row, and added by weight; projections are
    [E, in, out]. Of the weights only those of chosen experts are read."""
    each = chosen.shape[1]
    ids, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(len(gate_up), device=h.device), right=True).to(torch.int32)
    inner = swiglu(_grouped(h[order // each], gate_up, offs=ends)[None])[0]
    found = _grouped(inner, down, offs=ends)
    results = torch.empty_like(found)
    results[order] = found
    return (results.unflatten(0, (-1, each)) * weights[..., None]).sum(1)


def mix_all(h: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, swiglu: Swiglu) -> Tensor:
    """The same with every row through every expert, as far as their weights are not 0."""
    share = h.new_zeros(len(h), len(gate_up)).scatter_(1, chosen, weights)  # [R, E]
    inner = swiglu(torch.bmm(h.expand(len(gate_up), -1, -1), gate_up))
    return (torch.bmm(inner, down) * share.t()[..., None]).sum(0)
