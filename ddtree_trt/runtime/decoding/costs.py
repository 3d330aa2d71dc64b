"""Costs of rounds by tree size and context, from the latency profile and the sizes an engine pads its passes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime.decoding.latency import LatencyProfile


@dataclass(frozen=True)
class Costs:
    """Costs of rounds at one context length, in seconds."""

    single_s: float  # a round without drafting
    draft_s: float  # a draft, without the cost per drafted token
    nodes_s: NDArray[np.float64]  # [1 + max_nodes]: verifying n nodes, with the drafter's cost of n tokens
    least: int  # fewest nodes that pay if all possible ones are accepted; 0 where no number does
    deepest: int  # depth below which an accepted node adds no token
    level_s: float = 0.0  # each level of a tree that is drafted level by level; not in `draft_s` unless `at_depth`

    @property
    def max_nodes(self) -> int:
        return len(self.nodes_s) - 1

    @property
    def trial_s(self) -> float:
        """Loss of the smallest round that could pay, against a single-token round, when nothing is accepted."""
        return self.round_s(self.least) + self.level_s * self.least - self.single_s

    def round_s(self, nodes: int) -> float:
        """Seconds of a drafting round that verifies `nodes` nodes."""
        return self.draft_s + float(self.nodes_s[nodes])

    def at_depth(self, levels: int) -> Costs:
        """The costs of rounds that draft that many levels."""
        return replace(self, draft_s=self.draft_s + self.level_s * levels, level_s=0.0)

    def affordable(self, loss_s: float) -> int:
        """Most nodes of a round that loses at most `loss_s` against a single-token round when it commits one token, but
        at least as many as could pay."""
        most = int(self.nodes_s.searchsorted(loss_s + self.single_s - self.draft_s, side="right")) - 1
        return max(most, self.least)


class CostModel:
    """The latency profile, interpolated over the measured contexts.

    Where passes are padded, a tree costs as much as the next larger size: the curve is flat up to that size.
    """

    STEP = 64  # tokens of context over which costs are taken as constant

    def __init__(
        self,
        profile: LatencyProfile,
        max_nodes: int,
        max_depth: int,
        buckets: Sequence[int] | None = None,
        *,
        by_levels: bool = False,
    ) -> None:
        """`buckets`: numbers of tree tokens that passes are padded to, rising; None where they are not. `by_levels`:
        the profile's cost of a drafted token is that of a level of the tree."""
        self._by_levels = by_levels
        self._nodes = np.arange(max_nodes + 1)
        self._max_depth = max_depth
        padded = _padded_nodes(self._nodes, buckets)
        self.filled = _filled(padded)
        self._contexts = np.array([c.context for c in profile.contexts], float)
        self._draft = np.array([(c.draft_s, c.draft_token_s) for c in profile.contexts])
        self._verify = np.stack([c.verify_curve(int(padded.max()))[padded] for c in profile.contexts])
        self._known: dict[tuple[int, int], Costs] = {}

    def at(self, past: int, left: int | None = None) -> Costs:
        """Costs at `past` committed tokens, where a round can yield at most `left` ≥ 1 tokens (None: any number)."""
        step, deepest = past // self.STEP, self._max_depth if left is None else min(self._max_depth, left - 1)
        if (step, deepest) not in self._known:
            self._known[step, deepest] = self._interpolate((step + 0.5) * self.STEP, deepest)
        return self._known[step, deepest]

    def fill(self, nodes: int) -> int:
        """The largest number of nodes verified at the cost of `nodes`."""
        return int(self.filled[nodes])

    def _interpolate(self, past: float, deepest: int) -> Costs:
        place = float(np.interp(past, self._contexts, np.arange(len(self._contexts))))
        low, share = int(place), place - int(place)
        high = min(low + 1, len(self._contexts) - 1)
        verify = (1 - share) * self._verify[low] + share * self._verify[high]
        draft_s, token_s = ((1 - share) * self._draft[low] + share * self._draft[high]).tolist()
        chains_s, single_s = verify + token_s * self._nodes, float(verify[0])
        pays = (1 + np.minimum(self._nodes, deepest)) * single_s > draft_s + chains_s
        pays[0] = False
        nodes_s, level_s = (verify, token_s) if self._by_levels else (chains_s, 0.0)
        return Costs(single_s, draft_s, nodes_s, self.fill(int(pays.argmax())), deepest, level_s)


def _padded_nodes(nodes: NDArray[np.int64], buckets: Sequence[int] | None) -> NDArray[np.int64]:
    """How many nodes a pass over each number of `nodes` [n] computes."""
    if buckets is None:
        return nodes
    sizes = np.array(buckets)
    places = np.minimum(sizes.searchsorted(nodes + 1), len(sizes) - 1)
    return np.maximum(sizes[places] - 1, nodes)


def _filled(padded: NDArray[np.int64]) -> NDArray[np.int64]:
    """Largest n with the padded size of each n, both [1 + max_nodes]."""
    return padded.searchsorted(padded, side="right") - 1
