"""Heads whose children depend on their parent, and convolutions, in PyTorch; formulas in `models.drafters.heads`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree_trt.models.drafters.dflash import DrafterDims, layer_convolutions
from ddtree_trt.models.drafters.heads import PairHead


class PairScores:
    """The factors of a head's scores."""

    def __init__(self, head: PairHead, weights: Mapping[str, Tensor], prefix: str) -> None:
        self.candidates = head.candidates
        self._left, self._right, self._projection, self._gate, self._gate_bias = (
            None if part is None else weights[f"{prefix}{part.name}"]
            for part in (head.left, head.right, head.projection, head.gate, head.gate_bias)
        )

    def __call__(self, hidden: Tensor, bonus_tokens: Tensor, ids: Tensor, draft_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(left, right), float32 [N, L, C, r], of hidden states [N, L, H] of the rows that draft, bonus_tokens int [N]
        and each position's candidates int [N, L, C], as ids of the target and of the head."""
        assert self._left is not None and self._right is not None
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

    def __init__(self, dims: DrafterDims, weights: Mapping[str, Tensor], prefix: str) -> None:
        assert dims.convolution is not None
        groups = dims.convolution.groups
        self._layers: list[dict[str, tuple[Tensor, Tensor]]] = []
        for i in range(dims.num_layers):
            found = {}
            for place, parts in layer_convolutions(dims, i).items():
                base, kernels = (weights[f"{prefix}layers.{i}.{part.name}"] for part in parts)
                found[place] = base.unflatten(-1, (groups, -1)), kernels  # [2, taps, groups, H / groups], K
            self._layers.append(found)

    def around(self, index: int, place: str, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """The sublayer at `place`, ATTENTION or MLP, of layer `index`, with its convolution on its input x
        [N, block, H] and on its output."""
        base, kernels = self._layers[index][place]
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
