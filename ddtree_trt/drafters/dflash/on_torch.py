"""The DFlash drafter of the PyTorch engine: passes, network, heads and convolutions; `heads.py` has their formulas."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.weight_layout import DRAFTER
from ddtree_trt.device.buffers import CANDIDATES, REACHES
from ddtree_trt.drafters.dflash.dims import DFlashDims, layer_convolutions
from ddtree_trt.drafters.dflash.heads import PairHead
from ddtree_trt.plugins import MaskMode
from ddtree_trt.runtime.engines.base import Draft, DraftRequest
from ddtree_trt.runtime.engines.drafters import Drafter
from ddtree_trt.runtime.engines.torch.attention import Place
from ddtree_trt.runtime.engines.torch.device_round import BlockOnDevice
from ddtree_trt.runtime.engines.torch.graphs import Download, Upload
from ddtree_trt.runtime.engines.torch.model import Decoder, DrafterParts, target_ids
from ddtree_trt.runtime.engines.torch.parallel.split import Vocabulary
from ddtree_trt.runtime.engines.torch.pointwise import rotate
from ddtree_trt.runtime.engines.torch.products import ready_head
from ddtree_trt.runtime.tree import Bilinear, Marginals


class BlockDrafter(BlockOnDevice):
    """One pass over [bonus, MASK × L] of every slot, conditioned on tapped target states. They wait in a buffer of
    1 + L rows per slot, the most that a round commits; more are processed at once. The draft's graph processes the
    whole buffer, and the block overwrites the rows of entries that held no state."""

    def __init__(self, dims: DFlashDims, parts: DrafterParts) -> None:
        self.dims = dims
        self.cache = cache = parts.cache
        self.graphs = parts.graphs
        self.model = Network(dims, parts)
        device, slots, width = cache.slab.device, cache.slots, len(dims.tap_layers) * dims.hidden_size
        self.waiting = torch.zeros(slots, 1 + dims.draft_length, width, dtype=cache.slab.dtype, device=device)
        self.counts = [0] * slots  # waiting states of each slot
        self._control = Upload(device, *[(slots,)] * 4)
        self._learn_control = [Upload(device, (1,), (1,)) for _ in range(slots)]
        self._head = dims.pair_head
        self.top_ks: Sequence[int] | None = CANDIDATES if device.type == "cuda" else None  # None: any number
        longest = self._shapes(slots, CANDIDATES[-1], dims.draft_length)
        self._result = Download(sum(map(math.prod, longest)), device)

    def context_length(self, slot: int) -> int:
        return self.cache.lengths[slot] + self.counts[slot]

    def append_context(self, slot: int, token_ids: NDArray[np.int64], states: Tensor | None) -> None:
        assert states is not None, "a target built for a block drafter taps its states"
        count, rows = self.counts[slot], len(states)
        if count + rows <= self.waiting.shape[1]:
            self.waiting[slot, count : count + rows] = states
            self.counts[slot] += rows
            return
        states = torch.cat((self.waiting[slot, :count], states.to(self.waiting.dtype)))
        self.cache.check_room(slot, len(states))
        lengths = np.array([self.cache.lengths[slot]], np.int32)
        place = Place(*self._learn_control[slot].send(np.array([slot], np.int32), lengths))
        self.model.absorb(states[None], place)
        self.cache.append(slot, len(states))
        self.counts[slot] = 0

    def truncate(self, slot: int, length: int) -> None:
        context = min(self.cache.lengths[slot], length)
        self.cache.truncate(slot, context)
        self.counts[slot] = min(self.counts[slot], length - context)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        slots = [r.slot for r in requests]
        for slot in slots:
            self.cache.check_room(slot, self.counts[slot] + self.dims.block_size)
        top_k, longest = self._candidates(max(r.top_k for r in requests)), max(r.length for r in requests)
        # On a GPU the positions of a captured graph.
        reaches = (longest,) if self.top_ks is None else REACHES
        reach = next((r for r in reaches if longest <= r <= self.dims.draft_length), self.dims.draft_length)
        padding = self.cache.padding(slots, self.waiting.shape[1] + self.dims.block_size)
        sent, bonus = [*slots, *padding], [r.bonus_token for r in requests] + [0] * len(padding)
        columns = (sent, [self.cache.lengths[s] for s in sent], [self.counts[s] for s in sent], bonus)
        slot_ids, past, counts, bonus_tokens = self._control.send(*(np.array(c, np.int32) for c in columns))
        shapes = self._shapes(len(sent), top_k, reach)
        sizes = [math.prod(shape) for shape in shapes]
        places = self._result.on_device[: sum(sizes)].split(sizes)

        def work() -> None:
            found = self.run(slot_ids, past, counts, bonus_tokens, top_k, reach)
            for place, values in zip(places, found, strict=True):
                place.copy_(values.reshape(-1).view(torch.int32))

        self.graphs.run(("draft", len(sent), top_k, reach), work)
        parts = np.split(self._result.fetch(sum(sizes)), np.cumsum(sizes[:-1]))
        for slot in slots:
            self.cache.append(slot, self.counts[slot])
            self.counts[slot] = 0
        first, ids, *factors = (part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
        floats, *pairs = (part.view(np.float32) for part in (first, *factors))
        if pairs:
            arrays: tuple[NDArray[Any], ...] = (floats, ids, *pairs)
            return [Draft(Bilinear(*(array[n, : r.length] for array in arrays))) for n, r in enumerate(requests)]
        asked = [(n, slice(r.length), slice(r.top_k)) for n, r in enumerate(requests)]
        return [Draft(Marginals(floats[at], ids[at])) for at in asked]

    def _candidates(self, wanted: int) -> int:
        """The candidates per position of a draft that `wanted` are asked of: C, or K, of a captured graph its K."""
        if self._head is not None:
            return self._head.candidates
        if self.top_ks is not None:
            wanted = next((k for k in self.top_ks if k >= wanted), self.top_ks[-1])
        return min(wanted, self.dims.head_size)

    def _shapes(self, slots: int, top_k: int, reach: int) -> list[tuple[int, ...]]:
        """The shapes of what `run` returns."""
        each = (slots, reach, self._candidates(top_k))
        return [each, each, *([] if self._head is None else 2 * [(*each, self._head.rank)])]

    def warm_up(self, slot: int, budget: int) -> None:
        trees = sorted({min(nodes, budget) for nodes in (*REACHES, *CANDIDATES)})
        for top_k, length in [(1, self.dims.draft_length), *((nodes, nodes) for nodes in trees)]:
            self.draft([DraftRequest(slot, 0, top_k, length)])

    def run(
        self, slots: Tensor, past: Tensor, counts: Tensor, bonus_tokens: Tensor, top_k: int, reach: int
    ) -> tuple[Tensor, ...]:
        """The result is that of `Network.block`."""
        self.model.absorb(self.waiting.index_select(0, slots), Place(slots, past))
        if not reach:
            return ()
        return self.model.block(bonus_tokens, Place(slots, past + counts), top_k, reach)


def make(manifest: Manifest, parts: DrafterParts) -> Drafter:
    return BlockDrafter(manifest.drafting.dims, parts)


class Network:
    """The block drafter: the context's keys and values from tapped target states, then one block on top of them."""

    def __init__(self, dims: DFlashDims, parts: DrafterParts) -> None:
        self.dims = dims
        self.cache = cache = parts.cache
        weights, target = parts.weights, parts.target
        own_embedding = weights.get(f"{DRAFTER}embedding")
        self._embed = target.embed if own_embedding is None else partial(F.embedding, weight=own_embedding)
        own_head = weights.get(f"{DRAFTER}head")
        self._head = target.head if own_head is None else ready_head(own_head)
        self._vocabulary = target.vocabulary if own_head is None else Vocabulary(dims.head_size)
        self._kernels = parts.attention.kernels
        self._target_ids = target_ids(weights)
        self._masks = tuple(dims.mask(i) for i in range(dims.num_layers)) if dims.windows or dims.causal else ()
        around = Convolutions(dims, weights).around if dims.convolution else None
        self._product = parts.products
        self._decoder = Decoder(dims, weights, DRAFTER, cache, parts.attention, around, products=parts.products)
        self._pairs = None if dims.pair_head is None else PairScores(dims.pair_head, weights)
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
        _, context = decoder.math.add_norm(self._product(states, self._fc), None, self._context_norm, d.rms_norm_eps)
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

    def block(self, bonus_tokens: Tensor, place: Place, top_k: int, reach: int) -> tuple[Tensor, ...]:
        """Draft [bonus, MASK, …] behind `place.past`, for bonus_tokens int32 [N]: of the first `reach` positions, P,
        log-probabilities float32 [N, P, K], falling, and the candidates int32 [N, P, K]. With a head for pairs C stands
        for K, and unary scores for the log-probabilities, and left and right factors float32 [N, P, C, r] follow. The
        block is whole whatever P is, so that the positions are what they are in a longer draft."""
        d, batch = self.dims, len(bonus_tokens)
        masks = bonus_tokens.new_full((batch, d.block_size - 1), d.mask_token_id)
        token_ids = torch.cat((bonus_tokens[:, None], masks), 1)
        positions = place.past[:, None] + self._block
        x = self._embed(token_ids).to(self.cache.slab.dtype)
        if d.embedding_scale != 1:
            x = x * d.embedding_scale
        hidden, _ = self._decoder.run(x, positions, place, MaskMode.NONE, masks=self._masks)
        first = d.block_size - d.draft_length
        hidden = hidden[:, first : first + reach]
        logits = self._product.logits(hidden.flatten(0, 1), self._head)
        pairs, vocabulary, shape = self._pairs, self._vocabulary, (batch, reach, top_k)
        logits = logits if pairs else self._capped(logits)
        best, draft_ids = vocabulary.most_probable(logits, top_k, kernels=self._kernels, normalised=not pairs)
        draft_ids = draft_ids.view(shape)
        ids = (draft_ids if self._target_ids is None else self._target_ids[draft_ids]).to(torch.int32)
        if pairs:
            return self._capped(best).view(shape), ids, *pairs(hidden, bonus_tokens, ids, draft_ids)
        return best.view(shape), ids

    def _capped(self, logits: Tensor) -> Tensor:
        """The logits under the drafter's scale and cap, which keep their order."""
        scale, cap = self.dims.logit_scale, self.dims.logit_cap
        if scale != 1:
            logits = logits * scale
        return torch.tanh(logits / cap) * cap if cap else logits


class PairScores:
    def __init__(self, head: PairHead, weights: Mapping[str, Tensor]) -> None:
        self.candidates = head.candidates
        self._left, self._right = (weights[f"{DRAFTER}{part.name}"] for part in (head.left, head.right))
        self._projection, self._gate, self._gate_bias = (
            None if part is None else weights[f"{DRAFTER}{part.name}"]
            for part in (head.projection, head.gate, head.gate_bias)
        )

    def __call__(self, hidden: Tensor, bonus_tokens: Tensor, ids: Tensor, draft_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(left, right), float32 [N, L, C, r], of hidden states [N, L, H] of the rows that draft, bonus_tokens int [N]
        and each position's candidates int [N, L, C], as ids of the target and of the head."""
        bonus = bonus_tokens.to(ids.dtype)[:, None, None].expand(-1, 1, self.candidates)
        left = F.embedding(torch.cat((bonus, ids[:, :-1]), 1), self._left)
        if self._projection is not None:
            left = left * F.linear(hidden, self._projection)[:, :, None]
        if self._gate is not None:
            states = hidden[:, :, None].expand(-1, -1, self.candidates, -1)
            left = left * F.linear(torch.cat((states, left), -1), self._gate, self._gate_bias).sigmoid()
        return left.float(), F.embedding(draft_ids, self._right).float()


class Convolutions:
    """The convolutions around the sublayers of a drafter, over the rows of a block."""

    def __init__(self, dims: DFlashDims, weights: Mapping[str, Tensor]) -> None:
        assert dims.convolution is not None
        self._found: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}  # [2, taps, groups, H / groups], K
        for i in range(dims.num_layers):
            for place, parts in layer_convolutions(dims, i).items():
                base, kernels = (weights[f"{DRAFTER}layers.{i}.{part.name}"] for part in parts)
                self._found[i, place] = base.unflatten(0, (2, -1)).unflatten(-1, (dims.convolution.groups, -1)), kernels

    def around(self, index: int, place: str, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """The sublayer at `place` of layer `index`, with its convolution on its input x [N, block, H] and output."""
        base, kernels = self._found[index, place]
        dynamic = F.linear(x, kernels).unflatten(-1, (*base.shape[:3], 1))
        before, after = (base + dynamic).unbind(2)  # [N, block, taps, groups, H / groups] each
        return _convolved(sublayer(_convolved(x, before)), after)


def _convolved(x: Tensor, kernels: Tensor) -> Tensor:
    """x [N, block, H] under kernels [N, block, taps, groups, H / groups]; rows before the block are zeros."""
    rows = x.unflatten(-1, kernels.shape[-2:])
    total = kernels[:, :, 0] * rows
    for tap in range(1, min(kernels.shape[2], x.shape[1])):
        total = total + kernels[:, :, tap] * F.pad(rows[:, :-tap], (0, 0, 0, 0, tap, 0))
    return total.flatten(2)
