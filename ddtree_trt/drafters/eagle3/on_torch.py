"""The passes of an EAGLE-3 drafter in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.weight_layout import DRAFTER
from ddtree_trt.drafters.eagle3.dims import Eagle3Dims
from ddtree_trt.drafters.eagle3.drafter import EagleDrafter, Level, Nodes
from ddtree_trt.plugins import MaskMode
from ddtree_trt.runtime.engines.drafters import Drafter
from ddtree_trt.runtime.engines.passes import mask_words
from ddtree_trt.runtime.engines.torch.attention import Place
from ddtree_trt.runtime.engines.torch.model import Decoder, DrafterParts, head_logits, ready_head, target_ids


class TorchEagle:
    """The network and its cache. A pass of a draft computes all of its nodes anew: attention masks rows of the same
    pass only, and on a GPU the rows of one layer cost hardly more than its weights."""

    def __init__(self, dims: Eagle3Dims, parts: DrafterParts) -> None:
        self.dims = dims
        self.cache = parts.cache
        weights, target = parts.weights, parts.target
        self._decoder = Decoder(dims, weights, DRAFTER, parts.cache, parts.attention)
        self._fc = weights[f"{DRAFTER}fc"]
        self._state_norm = weights[f"{DRAFTER}state_norm"]
        self._embedding = weights[f"{DRAFTER}embedding"] if dims.own_embedding else target.embedding
        self._head = ready_head(weights[f"{DRAFTER}head"]) if dims.own_head else target.head
        self._target_ids = target_ids(weights)

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


def make(manifest: Manifest, parts: DrafterParts) -> Drafter:
    """The drafter of an engine."""
    limits = manifest.limits
    return EagleDrafter(TorchEagle(manifest.drafting.dims, parts), limits.prefill_chunk, limits.max_tokens_per_pass)
