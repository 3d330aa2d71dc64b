"""The passes of an autoregressive drafter in PyTorch."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.weight_layout import DRAFTER
from ddtree_trt.drafters.autoregressive.drafter import AutoregressiveDrafter
from ddtree_trt.plugins import MaskMode
from ddtree_trt.runtime.engines.base import VerifyRequest
from ddtree_trt.runtime.engines.drafters import Drafter
from ddtree_trt.runtime.engines.torch.model import DrafterParts, LanguageModel


class TorchLanguageModel:
    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.cache = model.cache

    def extend(self, chains: Sequence[VerifyRequest]) -> list[NDArray[np.float32]]:
        """See `drafters.LanguageModel`. Passes are padded to the longest chain."""
        place, ids, positions = self.cache.place(chains)
        hidden, _ = self._model.forward(ids, positions, place, MaskMode.TREE)
        logits = self._model.logits(torch.stack([h[len(c.tree) - 1] for h, c in zip(hidden, chains, strict=True)]))
        for chain in chains:
            self.cache.append(chain.slot, len(chain.tree))
        return list(logits.cpu().numpy())


def make(manifest: Manifest, parts: DrafterParts) -> Drafter:
    model = LanguageModel(manifest.drafter_dims, parts.weights, DRAFTER, parts.cache, parts.attention)
    return AutoregressiveDrafter(TorchLanguageModel(model), manifest.limits.prefill_chunk)
