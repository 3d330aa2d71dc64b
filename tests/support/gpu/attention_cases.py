"""Inputs of one attention call."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ddtree_trt.plugins import reference
from ddtree_trt.runtime.engines.torch.attention import Place

N, SLOTS, S, HQ, HKV, D = 2, 3, 40, 4, 2, 16
PAST, SLOT_IDS = (7, 20), (2, 0)


def case(tokens: int) -> tuple[list[Tensor], Place]:
    """q, k, v and caches in float32, and a random tree's mask."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(N, tokens, HQ, D), *[(N, tokens, HKV, D)] * 2, *[(SLOTS, HKV, S, D)] * 2]
    rng = np.random.default_rng(tokens)
    parents = np.array([[-1, *(rng.integers(0, i) for i in range(1, tokens))] for _ in range(N)], np.int32)
    mask = torch.from_numpy(np.stack([reference.packed_mask(p) for p in parents]))
    place = Place(torch.tensor(SLOT_IDS, dtype=torch.int32), torch.tensor(PAST, dtype=torch.int32), mask)
    return [torch.randn(shape, generator=generator) for shape in shapes], place
