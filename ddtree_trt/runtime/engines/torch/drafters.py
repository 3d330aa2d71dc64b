"""The drafters of the PyTorch engine: DFlash, and the passes of autoregressive and EAGLE-3 drafters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ddtree_trt import _native
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.weight_layout import DRAFTER
from ddtree_trt.models.drafters.dflash import DrafterDims
from ddtree_trt.models.drafters.eagle3 import Eagle3Dims
from ddtree_trt.models.drafters.kinds import KindName
from ddtree_trt.plugins import MaskMode
from ddtree_trt.runtime.candidates import Bilinear, Marginals
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, DrawnFrom
from ddtree_trt.runtime.engines.drafters import AutoregressiveDrafter, Drafter, Pass
from ddtree_trt.runtime.engines.eagle import EagleDrafter, Level, Nodes
from ddtree_trt.runtime.engines.padding import mask_words
from ddtree_trt.runtime.engines.torch.attention import Attention, Place, Scratch, attention_for
from ddtree_trt.runtime.engines.torch.cache import DeviceCache
from ddtree_trt.runtime.engines.torch.graphs import Download, Graphs, Upload
from ddtree_trt.runtime.engines.torch.model import (
    Decoder,
    DFlash,
    LanguageModel,
    Weights,
    head_logits,
    ready_head,
)
from ddtree_trt.runtime.tree import TokenTree

# Candidates per position of the captured graphs: a draft takes the next larger number. The last is the largest budget.
TOP_KS = (1, 16, 64, 256, 1024, 4096)


class BlockDrafter(Drafter):
    """DFlash: one pass over [bonus, MASK × L] of every slot, conditioned on the tapped target states of every committed
    token.

    States wait in a buffer of 1 + L rows per slot, the most that a round commits. The draft's graph processes the whole
    buffer, and the block overwrites the rows of entries that held no state. More states than that, such as a
    prompt's, are processed at once by `learn`.
    """

    def __init__(
        self,
        dims: DrafterDims,
        weights: Weights,
        target: LanguageModel,
        cache: DeviceCache,
        attention: Attention,
        graphs: Graphs,
    ) -> None:
        self.dims = dims
        self.cache = cache
        self.graphs = graphs
        self.model = DFlash(dims, weights, target, cache, attention)
        device, slots, width = cache.slab.device, cache.slots, len(dims.tap_layers) * dims.hidden_size
        self.waiting = torch.zeros(slots, 1 + dims.draft_length, width, dtype=cache.slab.dtype, device=device)
        self.counts = [0] * slots  # waiting states of each slot
        self._control = Upload(Upload.size(*[(slots,)] * 4), device)
        self._learn_control = [Upload(Upload.size((1,), (1,)), device) for _ in range(slots)]
        self._head = dims.pair_head
        self.top_ks: Sequence[int] | None = TOP_KS if device.type == "cuda" else None  # None: any number
        self._result = Download(sum(map(math.prod, self._shapes(slots, TOP_KS[-1]))), device)

    @property
    def waits(self) -> int:
        return self._result.waits

    def known(self, slot: int) -> int:
        return self.cache.lengths[slot] + self.counts[slot]

    def learn(self, slot: int, token_ids: NDArray[np.int64], states: Tensor | None) -> None:
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
        """One pass for all requests."""
        slots = [r.slot for r in requests]
        for slot in slots:
            self.cache.check_room(slot, self.counts[slot] + self.dims.block_size)
        top_k = self._candidates(max(r.top_k for r in requests))
        columns = (slots, [self.cache.lengths[s] for s in slots], [self.counts[s] for s in slots])
        arrays = [np.array(c, np.int32) for c in (*columns, [r.bonus_token for r in requests])]
        slot_ids, past, counts, bonus_tokens = self._control.send(*arrays)
        shapes = self._shapes(len(slots), top_k)
        sizes = [math.prod(shape) for shape in shapes]
        places = self._result.on_device[: sum(sizes)].split(sizes)

        def work() -> None:
            for place, values in zip(places, self.run(slot_ids, past, counts, bonus_tokens, top_k), strict=True):
                place.copy_(values.reshape(-1).view(torch.int32))

        self.graphs.run((len(requests), top_k), work)
        parts = np.split(self._result.fetch(sum(sizes)), np.cumsum(sizes[:-1]))
        for slot in slots:
            self.cache.append(slot, self.counts[slot])
            self.counts[slot] = 0
        first, ids, *factors = (part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
        floats = [part.view(np.float32) for part in (first, *factors)]
        if self._head is not None:
            unary, left, right = floats
            return [Draft(Bilinear(unary[n], ids[n], left[n], right[n])) for n in range(len(requests))]
        return [Draft(Marginals(floats[0][n, :, : r.top_k], ids[n, :, : r.top_k])) for n, r in enumerate(requests)]

    def _candidates(self, wanted: int) -> int:
        """The candidates per position of a draft that `wanted` are asked of: C, or K, of a captured graph its K."""
        if self._head is not None:
            return self._head.candidates
        if self.top_ks is not None:
            wanted = next((k for k in self.top_ks if k >= wanted), self.top_ks[-1])
        return min(wanted, self.dims.head_size)

    def _shapes(self, slots: int, top_k: int) -> list[tuple[int, ...]]:
        """The shapes of what `run` returns."""
        top_k = self._candidates(top_k)
        each = (slots, self.dims.draft_length, top_k)
        factors = [] if self._head is None else 2 * [(*each, self._head.rank)]
        return [each, each, *factors]

    def warm_up(self, slot: int, budget: int) -> None:
        def never(*_: object) -> DrawnFrom:
            raise AssertionError("a block drafter draws nothing")

        wanted = 1 if self._head else min(budget, self.dims.head_size, TOP_KS[-1])
        for top_k in TOP_KS[: 1 + next(i for i, k in enumerate(TOP_KS) if k >= wanted)]:
            self.draft([DraftRequest(slot, 0, min(top_k, wanted), self.dims.draft_length, never)])

    def hold(self, slots: Tensor, states: Tensor) -> None:
        """Put tapped states [N, m, M·H], m at most 1 + L, into the buffers of slots int32 [N]; `counts` stays as it
        is."""
        self.waiting[slots.long(), : states.shape[1]] = states

    def advance(self, slot: int, committed: int, *, waiting: int) -> None:
        """Count a round that ran on the device: the states of its last `waiting` tokens are in the buffer, all earlier
        ones in the cache."""
        self.cache.append(slot, self.counts[slot] + committed - waiting)
        self.counts[slot] = waiting

    def run(self, slots: Tensor, past: Tensor, counts: Tensor, bonus_tokens: Tensor, top_k: int) -> tuple[Tensor, ...]:
        """Process the waiting states and draft behind them; arguments int32 [N], result as of `DFlash.block`."""
        self.model.absorb(self.waiting.index_select(0, slots), Place(slots, past))
        return self.model.block(bonus_tokens, Place(slots, past + counts), top_k)


class TorchLanguageModel:
    """Passes of an autoregressive drafter's language model, over one slot at a time."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.cache = model.cache

    def extend(self, slot: int, tree: TokenTree, rows: NDArray[np.int64]) -> Pass:
        """Write a tree's T rows behind the slot's committed ones; the results have logits for `rows` [R]."""
        self.cache.check_room(slot, len(tree))
        device, past = self.cache.slab.device, self.cache.lengths[slot]

        def moved(array: NDArray[np.integer], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)

        place = Place(moved(np.array([slot])), moved(np.array([past])), moved(_native.packed_mask(tree.parents)[None]))
        ids, positions = moved(tree.token_ids[None]), moved((tree.depths + past)[None])
        hidden, _ = self._model.forward(ids, positions, place, MaskMode.TREE)
        logits = self._model.logits(hidden[0].index_select(0, moved(rows)))
        return Pass(logits.argmax(-1).cpu().numpy(), logits.cpu().numpy(), None)


class TorchEagle:
    """The network and its cache. A pass of a draft computes all of its nodes anew: attention masks rows of the same
    pass only, and on a GPU the rows of one layer cost hardly more than its weights."""

    def __init__(
        self, dims: Eagle3Dims, weights: Weights, target: LanguageModel, cache: DeviceCache, attention: Attention
    ) -> None:
        self.dims = dims
        self.cache = cache
        self._decoder = Decoder(dims, weights, DRAFTER, cache, attention)
        self._fc = weights[f"{DRAFTER}fc"]
        self._state_norm = weights[f"{DRAFTER}state_norm"]
        self._embedding = weights[f"{DRAFTER}embedding"] if dims.own_embedding else target.embedding
        self._head = ready_head(weights[f"{DRAFTER}head"]) if dims.own_head else target.head
        offsets = weights.get(f"{DRAFTER}to_target")  # int32 [V']
        self._target_ids = None if offsets is None else offsets + torch.arange(len(offsets), device=offsets.device)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(pieces))

    def absorb(self, slot: int, token_ids: NDArray[np.int64], states: Tensor, top_k: int) -> Level:
        rows, past = len(token_ids), self.cache.lengths[slot]
        self.cache.check_room(slot, rows)
        place = Place(self._moved([slot]), self._moved([past]))
        positions = self._moved(np.arange(past, past + rows)[None])
        x = F.linear(states[None], self._fc)
        h, x = self._run(token_ids, x, positions, place, MaskMode.CAUSAL)
        self.cache.append(slot, rows)
        return self._level(h[-1:], x[-1:], top_k)

    def expand(self, slot: int, nodes: Nodes, top_k: int) -> Level:
        size, past = len(nodes.token_ids), self.cache.lengths[slot]
        self.cache.check_room(slot, size)
        place = Place(self._moved([slot]), self._moved([past]), self._moved(packed(nodes.sees)[None]))
        positions = self._moved(nodes.depths[None] + past)
        x = torch.stack(list(nodes.features))[None]
        h, x = self._run(nodes.token_ids, x, positions, place, MaskMode.TREE)
        return self._level(h[nodes.first :], x[nodes.first :], top_k)

    def _run(
        self, token_ids: NDArray[np.int64], states: Tensor, positions: Tensor, place: Place, mode: MaskMode
    ) -> tuple[Tensor, Tensor]:
        """Rows of tokens [T] with the fused states [1, T, H]: (normed outputs, outputs), [T, H] each."""
        dims, decoder = self.dims, self._decoder
        eps, (layer,) = dims.rms_norm_eps, decoder.layers
        x, state = decoder.math.add_norm(states, None, self._state_norm, eps)
        embedded = F.embedding(self._moved(token_ids[None]), self._embedding)
        _, token = decoder.math.add_norm(embedded, None, layer.input_norm, eps)
        attended = decoder.attend(0, torch.cat((token, state), -1), positions, place, mode)
        x, h = decoder.math.add_norm(state if dims.norm_before_residual else x, attended, layer.post_norm, eps)
        x, h = decoder.math.add_norm(x, decoder.mlp(layer, h), decoder.norm, eps)
        return h[0], x[0]

    def _level(self, normed: Tensor, outputs: Tensor, top_k: int) -> Level:
        """The results of rows with these outputs [R, H]."""
        logits = head_logits(normed, self._head)
        best, ids = logits.topk(min(top_k, self.dims.head_size), -1)
        log_probs = best - logits.logsumexp(-1, keepdim=True)
        if self._target_ids is not None:
            ids = self._target_ids[ids]
        kept = normed if self.dims.norm_output else outputs
        return Level(list(kept.clone()), log_probs.cpu().numpy(), ids.to(torch.int32).cpu().numpy())

    def _moved(self, array: NDArray[np.integer] | list[int]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.cache.slab.device, torch.int32)


def packed(sees: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Bits int32 [m, W] of what each row sees, bool [m, m]: bit j % 32 of word j / 32."""
    size = len(sees)
    wide = np.zeros((size, 32 * mask_words(size)), bool)
    wide[:, :size] = sees
    return np.packbits(wide, axis=1, bitorder="little").view(np.int32)


def make_drafter(
    manifest: Manifest, weights: Weights, target: LanguageModel, scratch: Scratch, graphs: Graphs
) -> Drafter:
    """The drafter of an engine, with a separate cache; its captured passes share the memory of `graphs`."""
    dims, slab = manifest.drafter_dims, target.cache.slab
    dtype = weights[f"{DRAFTER}norm"].dtype  # a block drafter may have another precision than its target
    attention = attention_for(slab.device, dtype, dims.head_dim, scratch)
    cache = DeviceCache(dims, target.cache.slots, target.cache.rows, dtype, slab.device, kernels=attention.kernels)
    return _MAKERS[manifest.drafter_kind](manifest, weights, target, cache, attention, graphs)


def _dflash(
    manifest: Manifest,
    weights: Weights,
    target: LanguageModel,
    cache: DeviceCache,
    attention: Attention,
    graphs: Graphs,
) -> Drafter:
    return BlockDrafter(manifest.dflash, weights, target, cache, attention, graphs.sharing())


def _autoregressive(
    manifest: Manifest,
    weights: Weights,
    target: LanguageModel,
    cache: DeviceCache,
    attention: Attention,
    graphs: Graphs,
) -> Drafter:
    model = LanguageModel(manifest.drafter_dims, weights, DRAFTER, cache, attention)
    return AutoregressiveDrafter(TorchLanguageModel(model), manifest.limits.prefill_chunk)


def _eagle3(
    manifest: Manifest,
    weights: Weights,
    target: LanguageModel,
    cache: DeviceCache,
    attention: Attention,
    graphs: Graphs,
) -> Drafter:
    network = TorchEagle(manifest.eagle3, weights, target, cache, attention)
    return EagleDrafter(network, manifest.limits.prefill_chunk, manifest.limits.max_tokens_per_pass)


_MAKERS: Mapping[KindName, Callable[[Manifest, Weights, LanguageModel, DeviceCache, Attention, Graphs], Drafter]] = {
    "dflash": _dflash,
    "autoregressive": _autoregressive,
    "eagle3": _eagle3,
}
