"""Inputs of one attention call."""

from __future__ import annotations

import kernel_reference as reference
import numpy as np
import torch
from torch import Tensor

from ddtree_trt.runtime.engines.torch.attention import Place

N, SLOTS, S, HQ, HKV, D = 2, 3, 40, 4, 2, 16
PAST, SLOT_IDS = (7, 20), (2, 0)


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def case(tokens: int) -> tuple[Inputs, Place]:
    """q, k, v and caches in float32, and a random tree's mask."""
    generator = torch.Generator().manual_seed(tokens)
    new, cache = (N, tokens, HKV, D), (SLOTS, HKV, S, D)
    rng = np.random.default_rng(tokens)
    mask = torch.from_numpy(np.stack([reference.packed_mask(reference.random_parents(rng, tokens)) for _ in range(N)]))
    place = Place(torch.tensor(SLOT_IDS, dtype=torch.int32), torch.tensor(PAST, dtype=torch.int32), mask)
    q, k, v, cache_k, cache_v = (
        torch.randn(shape, generator=generator) for shape in ((N, tokens, HQ, D), new, new, cache, cache)
    )
    return (q, k, v, cache_k, cache_v), place
