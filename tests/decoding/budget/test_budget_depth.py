"""Automatic budgets of a drafter by levels: how many it drafts follows from what is accepted and what a level costs."""

from __future__ import annotations

import numpy as np
from simulated import costs

from ddtree_trt.runtime.decoding.budget.automatic import AutoBudgets, AutoDepth
from ddtree_trt.runtime.decoding.budget.latency import LatencyProfile
from ddtree_trt.runtime.tree import DraftTree, chain

NODES, DEPTH = 32, 12
CHEAP = costs(0.05, 0.05, 0.01, draft_token_s=0.05)
DEAR = costs(0.05, 0.05, 0.01, draft_token_s=0.6)


def depths(profile: LatencyProfile, accepted: int, rounds: int = 30, left: int = 1000) -> list[int]:
    """Levels of each round of a request whose rounds accept `accepted` tokens of what is drafted; 0 where none is."""
    budget = AutoBudgets(profile, NODES, DEPTH, by_levels=True).for_sequence()
    assert isinstance(budget, AutoDepth)
    found = []
    for _ in range(rounds):
        if not budget.ceiling(64, left):
            found.append(0)
            budget.observe(chain([]), np.zeros(1, np.int32), 99)
            continue
        assert budget.levels is not None
        found.append(budget.levels)
        tree: DraftTree = chain(np.zeros(budget.levels, np.int32), np.full(budget.levels, -0.05))
        tree = tree.cut(budget.choose(tree, 64))
        budget.observe(tree, np.arange(1 + min(accepted, len(tree)), dtype=np.int32), 99)
    return found


def test_depth_follows_what_is_accepted() -> None:
    deep, shallow = depths(CHEAP, 12), depths(CHEAP, 2)
    assert deep[-1] > shallow[-1] >= 2
    assert deep[-1] == DEPTH


def test_a_dear_level_is_drafted_less() -> None:
    assert max(depths(DEAR, 3)) <= max(depths(CHEAP, 3))


def test_single_tokens_where_nothing_is_accepted() -> None:
    for profile in (CHEAP, DEAR):
        found = depths(profile, 0)
        assert found[0] > 0 and found.count(0) > 20


def test_no_level_is_drafted_below_the_outputs_end() -> None:
    assert max(depths(CHEAP, 12, left=4)) <= 3
