"""Answers and drafts of given quality, for automatic budgets in simulated time: no clock is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from profiles import make_budgets

from ddtree_trt.runtime.candidates import Marginals
from ddtree_trt.runtime.decoding.budget.policy import AutoBudget, AutoBudgets, Budget, RoundPlan, SlotInput
from ddtree_trt.runtime.engines.profile import Profile
from ddtree_trt.runtime.tree import EMPTY, DraftTree, build_tree, chain
from workbench.drafts import Text

DEPTH, VOCAB = 15, 16


@dataclass(frozen=True)
class Quality:
    """How often the target takes what the drafter thinks it does (`trust`), and how sure the drafter is (`sharp`, the
    parameter of the Dirichlet its marginals are drawn from: the smaller, the surer)."""

    trust: float
    sharp: float = 0.02


GOOD = Quality(1.0)
LIAR = Quality(0.0)  # sure of itself and always wrong
UNSURE = Quality(0.3, sharp=1.0)  # knows nothing, and knows it


def text(quality: Quality, tokens: int, seed: int = 0) -> Text:
    """An answer of `tokens` tokens behind the first, whose ids are the drafter's ranks, or VOCAB for none of them."""
    rng = np.random.default_rng(seed)
    places = tokens + DEPTH
    marginals = np.sort(rng.dirichlet(np.full(VOCAB, quality.sharp), places))[:, ::-1]
    log_probs = np.log(np.maximum(marginals, 1e-12)).astype(np.float32)
    ranks = (rng.random((places, 1)) > np.cumsum(marginals, 1)).sum(1)
    said = np.where(rng.random(places) < quality.trust, ranks, VOCAB)[:tokens]
    rows = np.arange(tokens)[:, None] + np.arange(DEPTH)
    ids = np.broadcast_to(np.arange(VOCAB, dtype=np.int32), (DEPTH, VOCAB))
    return Text([0, *said.tolist()], [Marginals(drafted, ids) for drafted in log_probs[rows]])


@dataclass
class Spent:
    """Of one request."""

    seconds: float = 0.0
    rounds: int = 0
    drafts: int = 0
    tokens: int = 0


def decode(answer: Text, budget: Budget, profile: Profile, *, chains: bool = False) -> Spent:
    """One request in the profile's own time. `chains`: the drafter drafts token by token."""
    spent, place, left = Spent(), 0, len(answer.tokens) - 1
    while left:
        plan = RoundPlan([SlotInput(budget, 0, left)])
        (most,), tree = plan.ceilings(), EMPTY
        if most:
            drafted = chain(np.zeros(min(most, DEPTH), np.int32)) if chains else answer.tree(place, most)
            (nodes,) = plan.choose([drafted])
            tree = drafted.cut(nodes)
        path = answer.path(place, tree)
        if isinstance(budget, AutoBudget) and plan.decisions[0] is not None:
            budget.observe(plan.decisions[0], tree, path, ends=len(path) == left)
        near = profile.near
        passes = (most if chains else 1) if most else 0
        spent.seconds += passes * near.draft_s + float(near.verify_s(np.array(1 + len(tree))))
        spent.rounds, spent.drafts, spent.tokens = spent.rounds + 1, spent.drafts + bool(most), spent.tokens + len(path)
        place, left = place + len(path), left - len(path)
    return spent


def in_turn(answers: Sequence[Text], shared: AutoBudgets, profile: Profile, **options: bool) -> list[Spent]:
    """Requests one after the other, with automatic budgets."""
    return [decode(answer, AutoBudget(shared), profile, **options) for answer in answers]


def shared_budgets(profile: Profile, *, chains: bool = False) -> AutoBudgets:
    return make_budgets(profile, DEPTH if chains else 64, DEPTH, "tokens" if chains else "block")


def random_tree(rng: np.random.Generator, budget: int, depth: int = 7, sharp: float = 0.1) -> DraftTree:
    marginals = np.sort(rng.dirichlet(np.full(VOCAB, sharp), depth))[:, ::-1]
    token_ids = np.tile(np.arange(VOCAB, dtype=np.int32), (depth, 1))
    return build_tree(np.log(np.maximum(marginals, 1e-12)), token_ids, budget)
