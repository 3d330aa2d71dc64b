"""The random numbers of one completion. Each is a function of the request's seed and of its purpose.

A token is drawn as the argmax of log-weight + Gumbel noise, where the noise belongs to (seed, position, token id): the
draw does not depend on the tree the token is found in, and a difference by rounding changes it at near ties only. The
rule is in `cpp_plugins/include/ddtree/noise.h`, for host and device.

The target's draws, the drafter's, the decisions to keep drafted tokens and the draws in place of rejected ones have a
seed each. No number is used twice: a position is emitted once, and the drafter's noise also depends on the start of its
round, since a later round may draft for a position again.
"""

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import _native

Weights = NDArray[np.float64]
Ids = NDArray[np.int32]


class Noise:
    """Draws of one completion. Positions are indices in the whole sequence, prompt and output."""

    def __init__(self, seed: int | None, index: int) -> None:
        """For the request's completion `index`; without a seed the numbers are random."""
        sequence = np.random.SeedSequence(None if seed is None else [seed, index])
        self._target, self._draft, self._keep, self._residual = sequence.generate_state(4, np.uint64).tolist()
        self._round_start, self._round_seed = -1, 0  # of the latest draft: its round's first position, and its seed

    @property
    def target_seed(self) -> int:
        """The seed of the target's draws, as an int64, for a device that draws by the same rule."""
        return self._target - (1 << 64) if self._target >> 63 else self._target

    def draw_logits(self, position: int, logits: NDArray[np.float32], temperature: float) -> int:
        """The target's token from logits [V]; -1 where one is NaN or +inf, or none is finite."""
        return _native.draw_logits(logits, temperature, self._target, position)

    def draw(self, position: int, weights: Weights, ids: Ids | None) -> int:
        """The target's token as an index into weights [K] of the tokens `ids` [K]; None for 0 … K − 1."""
        return _native.draw_weights(weights, self._target, position, ids)

    def draft(self, start: int, position: int, weights: Weights, ids: Ids) -> int:
        """The drafter's token as an index into weights [K]. `start` is the first position its round drafts for."""
        if self._round_start != start:
            self._round_start, self._round_seed = start, _native.noise_bits(self._draft, start, 0)
        return _native.draw_weights(weights, self._round_seed, position, ids)

    def keeps(self, position: int, p: float, q: float) -> bool:
        """Whether a drafted token is kept: true with probability min(1, p/q)."""
        return (_native.noise_bits(self._keep, position, 0) >> 11) * 2.0**-53 * q < p

    def residual(self, position: int, weights: Weights) -> int:
        """The token drawn from weights [V] in place of a rejected one; -1 where all are 0."""
        return _native.draw_weights(weights, self._residual, position)
