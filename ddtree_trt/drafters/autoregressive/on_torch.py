"""The passes of an autoregressive drafter in PyTorch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree_trt import _native
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.weight_layout import DRAFTER
from ddtree_trt.drafters.autoregressive.drafter import AutoregressiveDrafter
from ddtree_trt.plugins import MaskMode
from ddtree_trt.runtime.engines.drafters import Drafter, Pass
from ddtree_trt.runtime.engines.torch.attention import Place
from ddtree_trt.runtime.engines.torch.model import DrafterParts, LanguageModel
from ddtree_trt.runtime.tree import TokenTree


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


def make(manifest: Manifest, parts: DrafterParts) -> Drafter:
    """The drafter of an engine."""
    model = LanguageModel(manifest.drafter_dims, parts.weights, DRAFTER, parts.cache, parts.attention)
    return AutoregressiveDrafter(TorchLanguageModel(model), manifest.limits.prefill_chunk)
