"""The drafters of the PyTorch engine: DFlash, and the passes of an autoregressive drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree_trt import _native
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.weight_layout import DRAFTER
from ddtree_trt.models.drafters.dflash import DrafterDims
from ddtree_trt.models.drafters.kinds import KindName
from ddtree_trt.plugins import MaskMode
from ddtree_trt.runtime.candidates import Marginals
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, DrawnFrom
from ddtree_trt.runtime.engines.drafters import AutoregressiveDrafter, Drafter, Pass
from ddtree_trt.runtime.engines.torch.attention import Attention, Place, Scratch, attention_for
from ddtree_trt.runtime.engines.torch.cache import DeviceCache
from ddtree_trt.runtime.engines.torch.graphs import Download, Graphs, Upload
from ddtree_trt.runtime.engines.torch.model import DFlash, LanguageModel, Weights
from ddtree_trt.runtime.tree import TokenTree

# Candidates per position of the captured graphs: a draft takes the next larger number. The last is the largest budget.
TOP_KS = (1, 16, 64, 256, 1024, 4096)


class BlockDrafter(Drafter):
    """DFlash: one pass over [bonus, MASK × L] of every slot, conditioned on the tapped target states of every committed
    token.

    States wait in a buffer of one block per slot, the most that a round commits. The draft's graph processes the whole
    buffer, and the block overwrites the rows of entries that held no state. More states than a block, such as a
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
        self.waiting = torch.zeros(slots, dims.block_size, width, dtype=cache.slab.dtype, device=device)
        self.counts = [0] * slots  # waiting states of each slot
        self._control = Upload(Upload.size(*[(slots,)] * 4), device)
        self._learn_control = [Upload(Upload.size((1,), (1,)), device) for _ in range(slots)]
        largest = min(TOP_KS[-1], dims.vocab_size)
        self._result = Download(2 * slots * (dims.block_size - 1) * largest, device)

    @property
    def waits(self) -> int:
        return self._result.waits

    def known(self, slot: int) -> int:
        return self.cache.lengths[slot] + self.counts[slot]

    def learn(self, slot: int, token_ids: NDArray[np.int64], states: Tensor | None) -> None:
        assert states is not None, "a target built for a block drafter taps its states"
        count, rows = self.counts[slot], len(states)
        if count + rows <= self.dims.block_size:
            self.waiting[slot, count : count + rows] = states
            self.counts[slot] += rows
            return
        states = torch.cat((self.waiting[slot, :count], states))
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
        wanted = max(r.top_k for r in requests)
        top_k = min(next((k for k in TOP_KS if k >= wanted), TOP_KS[-1]), self.dims.vocab_size)
        columns = (slots, [self.cache.lengths[s] for s in slots], [self.counts[s] for s in slots])
        arrays = [np.array(c, np.int32) for c in (*columns, [r.bonus_token for r in requests])]
        slot_ids, past, counts, bonus_tokens = self._control.send(*arrays)
        shape = (2, len(requests), self.dims.block_size - 1, top_k)
        size = int(np.prod(shape))
        out = self._result.on_device[:size].view(shape)

        def work() -> None:
            log_probs, ids = self.run(slot_ids, past, counts, bonus_tokens, top_k)
            out[0].copy_(log_probs.view(torch.int32))
            out[1].copy_(ids)

        self.graphs.run((len(requests), top_k), work)
        found = self._result.fetch(size).reshape(shape)
        for slot in slots:
            self.cache.append(slot, self.counts[slot])
            self.counts[slot] = 0
        log_probs = found[0].view(np.float32)
        tops = [(n, slice(r.top_k)) for n, r in enumerate(requests)]
        return [Draft(Marginals(log_probs[n, :, top], found[1, n, :, top])) for n, top in tops]

    def warm_up(self, slot: int, budget: int) -> None:
        def never(*_: object) -> DrawnFrom:
            raise AssertionError("a block drafter draws nothing")

        wanted = min(budget, self.dims.vocab_size, TOP_KS[-1])
        for top_k in TOP_KS[: 1 + next(i for i, k in enumerate(TOP_KS) if k >= wanted)]:
            self.draft([DraftRequest(slot, 0, min(top_k, wanted), self.dims.block_size - 1, never)])

    def hold(self, slots: Tensor, states: Tensor) -> None:
        """Put tapped states [N, m, M·H], m at most a block, into the buffers of slots int32 [N]; `counts` stays as it
        is."""
        self.waiting[slots.long(), : states.shape[1]] = states

    def advance(self, slot: int, committed: int, *, waiting: int) -> None:
        """Count a round that ran on the device: the states of its last `waiting` tokens are in the buffer, all earlier
        ones in the cache."""
        self.cache.append(slot, self.counts[slot] + committed - waiting)
        self.counts[slot] = waiting

    def run(
        self, slots: Tensor, past: Tensor, counts: Tensor, bonus_tokens: Tensor, top_k: int
    ) -> tuple[Tensor, Tensor]:
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


def make_drafter(
    manifest: Manifest, weights: Weights, target: LanguageModel, scratch: Scratch, graphs: Graphs
) -> Drafter:
    """The drafter of an engine, with a separate cache; its captured passes share the memory of `graphs`."""
    dims, slab = manifest.drafter_dims, target.cache.slab
    attention = attention_for(slab.device, slab.dtype, dims.head_dim, scratch)
    cache = DeviceCache(dims, target.cache.slots, target.cache.rows, slab.dtype, slab.device, kernels=attention.kernels)
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


_MAKERS: Mapping[KindName, Callable[[Manifest, Weights, LanguageModel, DeviceCache, Attention, Graphs], Drafter]] = {
    "dflash": _dflash,
    "autoregressive": _autoregressive,
}
