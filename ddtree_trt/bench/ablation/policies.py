"""Tree policies as an ablation tries them, and candidates without the conditions on the token above."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ddtree_trt.runtime.candidates import Bilinear, Candidates, Marginals
from ddtree_trt.runtime.decoding import policies
from ddtree_trt.runtime.tree import DraftTree


@dataclass(frozen=True)
class TriedPolicy:
    """A tree policy and the widths it is tried with, of which the best counts; 0 is the policy's own."""

    policy: policies.Policy
    widths: Callable[[int], tuple[int, ...]] = lambda nodes: (0,)  # by the most nodes

    @property
    def name(self) -> str:
        return self.policy.name

    def make(self, candidates: Candidates, nodes: int, depth: int, width: int) -> DraftTree:
        """The tree of at most so many nodes, and so many tokens of a path."""
        return self.policy.grow(candidates, nodes, depth, width or None)


def _powers(nodes: int) -> tuple[int, ...]:
    return tuple(1 << i for i in range(nodes.bit_length()))


HEAP = TriedPolicy(policies.HEAP)
EAGLE2 = TriedPolicy(policies.EAGLE2)
BEAM = TriedPolicy(policies.BEAM, _powers)
CHAIN = TriedPolicy(policies.CHAIN)
POLICIES = (HEAP, EAGLE2, BEAM, CHAIN)


def without_conditions(candidates: Candidates) -> Marginals | None:
    """The candidates as the drafter states them before it looks at the token above; None where they are not stated."""
    if not isinstance(candidates, Bilinear):
        return None
    top = candidates.unary.max(axis=1, keepdims=True)
    total = top + np.log(np.exp(candidates.unary - top).sum(axis=1, keepdims=True))
    return Marginals((candidates.unary - total).astype(np.float32), candidates.token_ids)
