"""Online calibration of the drafter's surrogate.

The heap ranks prefixes by the product of the drafter's marginals, which may be over- or under-confident. Per depth d we
keep how often a walk at a node with children at depth d accepted one (observed) and the marginal mass of those children
(predicted). Their ratio r_d scales the surrogate: a node at depth d is accepted with probability about
q̂ = exp(log_weight) · r_1 · … · r_d.

Evidence is forgotten exponentially, so that depths no longer tried drift back to the prior. A request's prior is the
engine-wide calibration; the engine's prior at a depth is the ratio of the depth above, since few walks reach the deep
ones. The engine learns from requests once they have clearly gained by drafting, from their first draft on: it expects
of a new request the acceptance of such requests, whatever the others were like.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt.runtime.tree import DraftTree

HELD = 16  # rounds of a request kept until it is known whether the parent learns them
LOWEST, HIGHEST = 0.02, 2.0  # bounds of r_d, so that a lucky or unlucky streak has a bounded effect


class Calibration:
    """Ratios r_d for depths 1…max_depth, shrunk by `prior` pseudo-observations towards a parent's r_d, or without a
    parent towards r_{d−1}, with r_0 = `root`."""

    def __init__(
        self, max_depth: int, *, prior: float, memory: float, parent: Calibration | None = None, root: float = 1.0
    ) -> None:
        self._evidence = np.zeros((2, max_depth))  # observed, predicted
        self._prior = prior
        self._keep = 1 - 1 / memory
        self._parent = parent
        self._root = root
        self._held: deque[NDArray[np.float64]] = deque(maxlen=HELD)  # evidence the parent has not learnt

    def ratios(self) -> NDArray[np.float64]:
        """r_1 … r_max_depth."""
        priors = None if self._parent is None else self._parent.ratios()
        return _native.calibrated_ratios(self._evidence, priors, self._prior, LOWEST, HIGHEST, self._root)

    def observe(self, tree: DraftTree, path: NDArray[np.int32], *, share: bool = True) -> None:
        """Learn from a verified tree and the accepted path [m], root first, at the depths the walk tried.

        With `share` the parent learns it too, and the evidence held back before.
        """
        mass = _native.tried_mass(tree.parents, tree.log_weights, path)
        _native.learn(self._evidence, mass, self._keep)
        if self._parent is None:
            return
        self._held.append(mass)
        if share:
            for each in self._held:
                _native.learn(self._parent._evidence, each, self._parent._keep)
            self._held.clear()

    def withhold(self) -> None:
        """Drop the evidence held back for the parent."""
        self._held.clear()


class Outlook:
    """The tokens that a round's draft is expected to add by the number of its nodes, from the rounds before."""

    def __init__(self, first: NDArray[Any], memory: float) -> None:
        """`first` [W]: what is expected before any round."""
        self.tokens = first.astype(np.float64)
        self.rounds = 0
        self._memory = memory

    def learn(self, tokens: NDArray[np.float64]) -> None:
        """Take a round of which `tokens` [W] were expected."""
        self.rounds += 1
        self.tokens += (tokens - self.tokens) / min(self.rounds, self._memory)
