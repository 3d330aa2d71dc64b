"""Forced acceptance in rounds that stay on the device: the PyTorch engine's, with the target's choices replaced."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ddtree_trt.drafters.dflash.on_torch import BlockDrafter
from ddtree_trt.runtime.engines.torch.device_round import DeviceRound
from ddtree_trt.runtime.engines.torch.rounds import TorchRounds

if TYPE_CHECKING:
    from torch import Tensor

    from ddtree_trt.runtime.engines.torch.engine import TorchEngine


class ForcedRounds(TorchRounds):
    """Rounds apart from the engine's own, each of which commits `acceptance_length` tokens, bonus included."""

    def __init__(self, engine: TorchEngine, acceptance_length: int) -> None:
        drafter = engine.drafter
        assert isinstance(drafter, BlockDrafter), "only an engine with a block drafter has rounds"
        super().__init__(engine.target, drafter, partial(_ForcedRound, acceptance_length - 1))


class _ForcedRound(DeviceRound):
    """A device round with all its work, in which only the target's choices are replaced."""

    def __init__(self, accepted: int, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._accepted = accepted
        slots, length, width = self.candidates.shape
        # Whether a token id is a candidate of a position [slots, L, K + 2]: ids 0 … K, at least one of which is none;
        # all larger ids share the last column.
        self._taken = self.candidates.new_zeros((slots, length, width + 2)).bool()

    def choose(self, logits: Tensor) -> Tensor:
        """Choices that follow the chain of the most probable tokens of each depth, which is in every tree, and then
        leave the tree with a token that is no candidate."""
        super().choose(logits)
        below = self.depths.long().clamp(max=self.candidates.shape[1] - 1)  # a node's children are of this position
        last = self._taken.shape[2] - 1
        taken = self._taken.fill_(False).scatter_(2, self.candidates.long().clamp(max=last), True)
        absent = taken[:, :, :last].int().argmin(-1).to(self.candidates.dtype)
        spine, leaving = (tokens.gather(1, below) for tokens in (self.candidates[:, :, 0], absent))
        return spine.where(self.depths < self._accepted, leaving).contiguous()
