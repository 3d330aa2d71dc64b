"""Online calibration of the drafter's surrogate.

The heap ranks prefixes by the product of the drafter's marginals, which may be over- or under-confident. Per depth d we
keep how often a walk at a node with children at depth d accepted one (observed) and the marginal mass of those children
(predicted). Their ratio r_d scales the surrogate: a node at depth d is accepted with probability about
q̂ = exp(log_weight) · r_1 · … · r_d.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt.runtime.tree import DraftTree

PRIOR = 4.0  # pseudo-observations of each depth
MEMORY = 48.0  # rounds after which evidence counts a third, so that depths no longer tried drift back to the prior
LOWEST, HIGHEST = 0.02, 2.0  # bounds of r_d, so that a lucky or unlucky streak has a bounded effect


class Calibration:
    """Ratios r_d of one request for depths 1…max_depth, shrunk towards r_{d−1}, with r_0 = `root`: few walks reach the
    deep ones."""

    def __init__(self, max_depth: int, root: float = 1.0) -> None:
        self._evidence = np.zeros((2, max_depth))  # observed, predicted
        self._root = root

    def ratios(self) -> NDArray[np.float64]:
        """r_1 … r_max_depth."""
        return _native.calibrated_ratios(self._evidence, None, PRIOR, LOWEST, HIGHEST, self._root)

    def observe(self, tree: DraftTree, path: NDArray[np.int32]) -> None:
        """Learn from a verified tree and the accepted path [m], root first, at the depths the walk tried."""
        mass = _native.tried_mass(tree.parents, tree.log_weights, path)
        _native.learn(self._evidence, mass, 1 - 1 / MEMORY)
