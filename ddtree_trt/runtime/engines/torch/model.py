"""Both networks in PyTorch: a language model, and the DFlash drafter, which may share its target's
embedding and head.

Everything is a function of tensors of fixed shape, the committed lengths included, so that a pass can be captured into
a CUDA graph once and replayed at any length. Rows behind the real ones are padding: they see themselves only, write
their keys and values behind those of the real rows, and their outputs are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree_trt.artifact.weight_layout import DRAFTER
from ddtree_trt.models.decoder import Part, TransformerDims, decoder_layers
from ddtree_trt.models.drafters.dflash import DrafterDims, Sight
from ddtree_trt.models.drafters.heads import ATTENTION, MLP
from ddtree_trt.plugins import MaskMode
from ddtree_trt.runtime.engines.torch.attention import Attention, Place
from ddtree_trt.runtime.engines.torch.cache import DeviceCache
from ddtree_trt.runtime.engines.torch.parallel.shard import ALONE, Shard, Vocabulary
from ddtree_trt.runtime.engines.torch.parts.experts import mixture
from ddtree_trt.runtime.engines.torch.parts.heads import Convolutions, PairScores
from ddtree_trt.runtime.engines.torch.pointwise import math_for, rotary_tables, rotate

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Layer:
    """A layer's weights, named as its parts are."""

    qkv: Tensor  # [(Hq + 2·Hkv)·D, H]
    o: Tensor  # [H, Hq·D]
    input_norm: Tensor  # [H]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2·inner, H], or of all experts [E·2·inner, H]
    down: Tensor  # [H, inner], or [E·H, inner]
    qkv_bias: Tensor | None = None  # [(Hq + 2·Hkv)·D], where the family has one
    q_norm: Tensor | None = None  # [D], likewise
    k_norm: Tensor | None = None  # [D], likewise
    router: Tensor | None = None  # [E, H], likewise


class Decoder:
    """The layers of one network, with their cache and rotary tables."""

    def __init__(
        self,
        dims: TransformerDims,
        weights: Weights,
        prefix: str,
        cache: DeviceCache,
        attention: Attention,
        convolutions: Convolutions | None = None,
        shard: Shard = ALONE,
    ) -> None:
        """`dims` and weights are those of the shard."""
        self._shard = shard
        self.dims = dims
        self.cache = cache
        self.attention = attention
        self._convolutions = convolutions
        self.math = math_for(attention.kernels, dims)
        self.layers = [_layer(weights, prefix, i, parts) for i, parts in enumerate(decoder_layers(dims))]
        self.norm = weights[f"{prefix}norm"]
        self.tables = rotary_tables(dims, cache.rows, cache.slab.device)
        self.scale = dims.head_dim**-0.5

    def attend(self, index: int, h: Tensor, positions: Tensor, place: Place, mode: MaskMode, window: int = 0) -> Tensor:
        """Attention of layer `index` over rows h [N, T, H], whose keys and values go into the cache: [N, T, H]."""
        d, layer = self.dims, self.layers[index]
        q, k, v = self.math.split_qkv(
            F.linear(h, layer.qkv, layer.qkv_bias),
            layer.q_norm,
            layer.k_norm,
            self.tables,
            positions,
            d.rms_norm_eps,
            d.num_heads,
        )
        seen = self.attention(q, k, v, *self.cache.layer(index), place, mode, self.scale, window)
        return self._shard.all_reduce(F.linear(seen.flatten(2), layer.o))

    def mlp(self, layer: Layer, h: Tensor) -> Tensor:
        """SwiGLU of rows h [N, T, H], or that of the experts they choose: [N, T, H]."""
        if layer.router is not None and self.dims.experts is not None:
            weights = layer.router, layer.gate_up, layer.down
            return self._shard.all_reduce(mixture(h, *weights, self.dims.experts, self.math.swiglu))
        return self._shard.all_reduce(F.linear(self.math.swiglu(F.linear(h, layer.gate_up)), layer.down))

    def _around(self, index: int, where: str, h: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """A sublayer over rows h [N, T, H], with the convolution there where the network has one."""
        if self._convolutions is None:
            return sublayer(h)
        return self._convolutions.around(index, where, h, sublayer)

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        place: Place,
        mode: MaskMode,
        taps: tuple[int, ...] = (),
        sights: Sequence[Sight] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Rows x [N, T, H] at positions int32 [N, T] through all layers: the normed hidden states [N, T, H] and the
        tapped layers' outputs. `sights`, where given, replace the mode: what rows see in each layer."""
        eps, tapped = self.dims.rms_norm_eps, []
        update: Tensor | None = None  # the MLP's output, added to x by the next norm
        for i, layer in enumerate(self.layers):
            x, h = self.math.add_norm(x, update, layer.input_norm, eps)
            if i - 1 in taps:
                tapped.append(x)
            seen, window = _mask(sights[i]) if sights else (mode, 0)
            attend = partial(self.attend, i, positions=positions, place=place, mode=seen, window=window)
            x, h = self.math.add_norm(x, self._around(i, ATTENTION, h, attend), layer.post_norm, eps)
            update = self._around(i, MLP, h, partial(self.mlp, layer))
        x, h = self.math.add_norm(x, update, self.norm, eps)
        if len(self.layers) - 1 in taps:
            tapped.append(x)
        return h, tapped


def _mask(sight: Sight) -> tuple[MaskMode, int]:
    """The mode and the window of an attention whose rows have that sight."""
    return MaskMode.CAUSAL if sight.causal else MaskMode.NONE, sight.window


def _layer(weights: Weights, prefix: str, index: int, parts: Iterable[Part]) -> Layer:
    """The weights of layer `index`. A part may be stored in one tensor [layers, …] for all layers."""

    def find(name: str) -> Tensor:
        stacked = weights.get(f"{prefix}{name}")
        return weights[f"{prefix}layers.{index}.{name}"] if stacked is None else stacked[index]

    return Layer(**{part.name: find(part.name) for part in parts})


class LanguageModel:
    """A target, or an autoregressive drafter: tokens in, logits and tapped states out."""

    def __init__(
        self,
        dims: TransformerDims,
        weights: Weights,
        prefix: str,
        cache: DeviceCache,
        attention: Attention,
        taps: tuple[int, ...] = (),
        shard: Shard = ALONE,
    ) -> None:
        """`dims` and weights are those of the shard, apart from `vocab_size`."""
        self.dims = dims
        self.cache = cache
        self.taps = taps
        self.vocabulary = Vocabulary(dims.vocab_size, shard)
        self.embedding = weights[f"{prefix}embedding"]
        self.head = ready_head(weights.get(f"{prefix}head", self.embedding))
        self._decoder = Decoder(dims, weights, prefix, cache, attention, shard=shard)

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
        return head_logits(hidden, self.head, out)


def ready_head(head: Tensor) -> Tensor:
    """A head as `head_logits` takes it: float32 sums of half-precision products are available in CUDA only."""
    return head if head.is_cuda else head.float()


def head_logits(hidden: Tensor, head: Tensor, out: Tensor | None = None) -> Tensor:
    """float32 [R, V] of hidden states [R, H], kept in the float32 they are summed in: half precisions have steps
    between large logits in which different tokens would look equal."""
    if out is None:
        out = torch.empty(len(hidden), len(head), device=hidden.device)
    if hidden.is_cuda and head.dtype != torch.float32:
        return torch.ops.aten.mm.dtype_out(hidden.to(head.dtype), head.t(), torch.float32, out=out)
    return torch.mm(hidden.to(head.dtype), head.t(), out=out)


class DFlash:
    """The block drafter: the context's keys and values from tapped target states, then one block on top of them."""

    def __init__(
        self, dims: DrafterDims, weights: Weights, target: LanguageModel, cache: DeviceCache, attention: Attention
    ) -> None:
        self.dims = dims
        self.cache = cache
        own_embedding = weights.get(f"{DRAFTER}embedding")
        self._embed = target.embed if own_embedding is None else partial(F.embedding, weight=own_embedding)
        own_head = weights.get(f"{DRAFTER}head")
        self._head = target.head if own_head is None else ready_head(own_head)
        self._vocabulary = target.vocabulary if own_head is None else Vocabulary(dims.head_size)
        offsets = weights.get(f"{DRAFTER}to_target")  # int32 [V']
        self._target_ids = None if offsets is None else offsets + torch.arange(len(offsets), device=offsets.device)
        self._sights = tuple(dims.sight(i) for i in range(dims.num_layers)) if dims.windows or dims.causal else ()
        convolutions = Convolutions(dims, weights, DRAFTER) if dims.convolution else None
        self._decoder = Decoder(dims, weights, DRAFTER, cache, attention, convolutions)
        self._pairs = None if dims.pair_head is None else PairScores(dims.pair_head, weights, DRAFTER)
        self._fc = weights[f"{DRAFTER}fc"]
        self._context_norm = weights[f"{DRAFTER}context_norm"]
        first, *_ = dims.qkv_widths
        self._context_kv = weights[f"{DRAFTER}qkv"][:, first:]  # [layers, 2·Hkv·D, H]
        bias = weights.get(f"{DRAFTER}qkv_bias")
        self._context_bias = None if bias is None else bias[:, None, first:]  # [layers, 1, 2·Hkv·D]
        norms = [layer.k_norm for layer in self._decoder.layers if layer.k_norm is not None]
        self._k_norm = torch.stack(norms)[:, None, None, None] if norms else None  # [layers, 1, 1, 1, D]
        self._block = torch.arange(dims.block_size, dtype=torch.int32, device=cache.slab.device)

    def absorb(self, states: Tensor, place: Place) -> None:
        """Write the keys and values of context rows, from tapped target states [N, C, M·H], behind `place.past`."""
        d, decoder = self.dims, self._decoder
        batch, rows = states.shape[:2]
        _, context = decoder.math.add_norm(F.linear(states, self._fc), None, self._context_norm, d.rms_norm_eps)
        context = context.flatten(0, 1)
        # [layers, N·C, 2·Hkv·D], by a view of the stored weights that leaves out those of the queries.
        product = torch.bmm(context.expand(d.num_layers, -1, -1), self._context_kv.transpose(1, 2))
        if self._context_bias is not None:
            product = product + self._context_bias
        both = product.view(d.num_layers, batch, rows, 2, d.num_kv_heads, d.head_dim)
        keys = both[:, :, :, 0]
        if self._k_norm is not None:
            keys = F.rms_norm(keys, (d.head_dim,), None, d.rms_norm_eps) * self._k_norm
        positions = place.past[:, None] + torch.arange(rows, dtype=torch.int32, device=states.device)
        keys = rotate(keys, decoder.tables, positions).to(states.dtype)
        self.cache.write(torch.stack((keys, both[:, :, :, 1]), 1), place, positions)

    def block(self, bonus_tokens: Tensor, place: Place, top_k: int) -> tuple[Tensor, ...]:
        """Draft [bonus, MASK, …] behind `place.past`, for bonus_tokens int32 [N]: log-probabilities float32 [N, L, K],
        falling, and the candidates int32 [N, L, K]. With a head for pairs C stands for K, and unary scores for the
        log-probabilities, and left and right factors float32 [N, L, C, r] follow."""
        d, batch = self.dims, len(bonus_tokens)
        masks = bonus_tokens.new_full((batch, d.block_size - 1), d.mask_token_id)
        token_ids = torch.cat((bonus_tokens[:, None], masks), 1)
        positions = place.past[:, None] + self._block
        x = self._embed(token_ids).to(self._fc.dtype)
        if d.embedding_scale != 1:
            x = x * d.embedding_scale
        hidden, _ = self._decoder.run(x, positions, place, MaskMode.NONE, sights=self._sights)
        hidden = hidden[:, d.block_size - d.draft_length :]
        logits = head_logits(hidden.flatten(0, 1), self._head)
        if self._pairs is None:
            logits = self._capped(logits)
        best, draft_ids = self._vocabulary.topk(logits, top_k)
        shape = (batch, d.draft_length, top_k)
        draft_ids = draft_ids.view(shape)
        ids = (draft_ids if self._target_ids is None else self._target_ids[draft_ids]).to(torch.int32)
        if self._pairs is not None:
            return self._capped(best).view(shape), ids, *self._pairs(hidden, bonus_tokens, ids, draft_ids)
        return (best - self._vocabulary.logsumexp(logits)).view(shape), ids

    def _capped(self, logits: Tensor) -> Tensor:
        """The logits under the drafter's scale and cap, which keep their order."""
        scale, cap = self.dims.logit_scale, self.dims.logit_cap
        if scale != 1:
            logits = logits * scale
        return torch.tanh(logits / cap) * cap if cap else logits
