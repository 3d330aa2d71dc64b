"""Tree policies against plain statements of them, and the parameters that choose and limit trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import make_budgets, make_profile
from scripted import ScriptedEngine, generate, verbs
from scripted_models import Good, MarkovTarget

from ddtree_trt import _native
from ddtree_trt.runtime.candidates import NO_ROW, Bilinear, Candidates, LinkedRows, Marginals
from ddtree_trt.runtime.decoding import loop
from ddtree_trt.runtime.decoding.budget.policy import AutoBudget, RoundPlan, SlotInput
from ddtree_trt.runtime.decoding.policies import EAGLE2, HEAP, POLICIES, Policy, TreePlan
from ddtree_trt.runtime.params import SamplingParams

Prefix = tuple[float, tuple[int, ...]]  # weight, tokens


def candidates(form: str, seed: int, length: int = 4, count: int = 4) -> Candidates:
    """Candidates of each record. Tokens differ within a row; those of marginals are rounded, so that there are ties."""
    rng = np.random.default_rng(seed)
    logits = -np.sort(-rng.normal(0, 1.5, (length, count)), axis=1)
    ids = np.stack([rng.permutation(20)[:count] for _ in range(length)]).astype(np.int32)
    if form == "marginals":
        return Marginals((np.round(logits - logits.max()) / 2).astype(np.float32), ids)
    left, right = rng.normal(0, 1, (2, length, count, 3)).astype(np.float32)
    form_of = Bilinear(logits.astype(np.float32), ids, left, right)
    if form == "bilinear":
        return form_of
    rows = form_of.child_log_probs(np.arange(1 + (length - 1) * count))
    pruned = np.where(rng.random(rows.rows.shape) < 0.3, NO_ROW, rows.rows)
    return LinkedRows(rows.log_probs, rows.token_ids, pruned.astype(np.int32))


def children(of: Candidates, row: int) -> list[tuple[float, int, int]]:
    """(log-probability, token, row) of each candidate of a row."""
    if row == NO_ROW or of.empty:
        return []
    return list(zip(*(part[0].tolist() for part in of.child_log_probs([row])), strict=True))


def plain_levels(of: Candidates, width: int, max_depth: int, keep_all: bool) -> list[list[Prefix]]:
    """Depth by depth the children of the `width` best nodes of the depth above: all `width` of each, or the best."""
    level: list[tuple[float, tuple[int, ...], int]] = [(0.0, (), 0)]
    levels: list[list[Prefix]] = []
    while level and len(levels) < max_depth:
        grown = [
            (weight + log_prob, (*tokens, token), below)
            for weight, tokens, row in level[:width]
            for log_prob, token, below in children(of, row)[:width]
        ]
        grown.sort(key=lambda node: -node[0])
        level = grown if keep_all else grown[:width]
        levels.append([(weight, tokens) for weight, tokens, _ in level])
    return levels


def plain_beam(of: Candidates, budget: int, width: int, max_depth: int) -> list[Prefix]:
    return [node for level in plain_levels(of, width, max_depth, keep_all=False) for node in level][:budget]


def plain_eagle2(of: Candidates, budget: int, width: int, max_depth: int) -> list[Prefix]:
    pool = [node for level in plain_levels(of, width, max_depth, keep_all=True) for node in level]
    return sorted(pool, key=lambda node: (-node[0], len(node[1])))[:budget]


def plain_chain(of: Candidates, budget: int, width: int, max_depth: int) -> list[Prefix]:
    nodes: list[Prefix] = []
    weight, tokens, row = 0.0, tuple[int, ...](), 0
    while len(nodes) < min(budget, max_depth) and (found := children(of, row)):
        log_prob, token, row = found[0]
        weight, tokens = weight + log_prob, (*tokens, token)
        nodes.append((weight, tokens))
    return nodes


PLAIN: dict[str, Callable[[Candidates, int, int, int], list[Prefix]]] = {
    "beam": plain_beam,
    "eagle2": plain_eagle2,
    "chain": plain_chain,
}
FORMS = ("marginals", "bilinear", "linked")


def grown(plan: TreePlan, of: Candidates) -> list[Prefix]:
    tree = plan.grow(of)
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(tree.parents[1:].tolist()):
        assert parent <= node, "a parent comes before its children"
        paths.append((*paths[parent], int(tree.token_ids[node])))
        assert tree.depths[node] == len(paths[-1])
    return list(zip(tree.log_weights.tolist(), paths[1:], strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PLAIN)
@given(
    seed=st.integers(0, 99), budget=st.integers(0, 40), width=st.integers(1, 5), max_depth=st.sampled_from([1, 2, 3, 9])
)
def test_a_policy_is_its_plain_statement(
    name: str, form: str, seed: int, budget: int, width: int, max_depth: int
) -> None:
    of = candidates(form, seed)
    found = grown(TreePlan(budget, POLICIES[name], max_depth, width), of)
    expected = PLAIN[name](of, budget, width, max_depth)
    assert [tokens for _, tokens in found] == [tokens for _, tokens in expected]
    np.testing.assert_allclose([w for w, _ in found], [w for w, _ in expected], rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@settings(max_examples=25)
@given(seed=st.integers(0, 99), width=st.sampled_from([None, 1, 2, 3]), max_depth=st.sampled_from([None, 1, 3]))
def test_trees_nest(policy: Policy, form: str, seed: int, width: int | None, max_depth: int | None) -> None:
    """So automatic budgets may cut them."""
    of = candidates(form, seed)
    largest = TreePlan(400, policy, max_depth, width).grow(of)
    for budget in (0, 1, 2, 5, 11, len(largest), len(largest) + 1):
        tree, cut = TreePlan(budget, policy, max_depth, width).grow(of), largest.cut(budget)
        for name in ("token_ids", "depths", "parents", "log_weights"):
            np.testing.assert_array_equal(getattr(tree, name), getattr(cut, name))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_no_policy_has_more_mass_than_the_heap(policy: Policy) -> None:
    for seed in range(20):
        of = candidates("bilinear", seed)
        for budget in (1, 4, 12):
            mass = np.exp(TreePlan(budget, policy).grow(of).log_weights).sum()
            assert mass <= np.exp(TreePlan(budget, HEAP).grow(of).log_weights).sum() + 1e-12


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_boundaries(policy: Policy) -> None:
    none = Marginals(np.zeros((0, 0), np.float32), np.zeros((0, 0), np.int32))
    impossible = Marginals(np.array([[0, -np.inf], [-np.inf] * 2], np.float32), np.array([[1, 2], [3, 4]], np.int32))
    assert len(TreePlan(5, policy).grow(none)) == 0
    assert TreePlan(5, policy).grow(impossible).token_ids.tolist() == [1]
    assert len(TreePlan(5, policy, max_depth=1).grow(candidates("bilinear", 0, length=1, count=1))) == 1
    for wrong in (np.nan, np.inf):
        rows = np.array([[-1, wrong]], np.float32)
        with pytest.raises(ValueError, match=r"below \+inf and not NaN"):
            TreePlan(5, policy).grow(Marginals(rows, np.array([[1, 2]], np.int32)))


def test_equal_nodes_are_kept_shallow_first_with_their_ancestors() -> None:
    """Certain tokens have children of their own weight."""
    certain = Marginals(np.array([[-1, -1]] + [[0, -1]] * 2, np.float32), np.array([[1, 2]] * 3, np.int32))
    just_above = Marginals(certain.log_probs + np.float32(1e-7), certain.token_ids)
    assert TreePlan(6, EAGLE2, width=2).grow(just_above).depths.tolist() == [1, 1, 2, 2, 3, 3]
    for budget, depths in ((1, [1]), (2, [1, 1]), (3, [1, 1, 2]), (6, [1, 1, 2, 2, 3, 3])):
        assert TreePlan(budget, EAGLE2, width=2).grow(certain).depths.tolist() == depths


def test_a_rounds_tree_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is drafted by is what it is made by, and making the plan is a good part of a round's own time."""
    plans: list[TreePlan] = []

    def counted(*args: Any) -> TreePlan:
        plans.append(TreePlan(*args))
        return plans[-1]

    monkeypatch.setattr(loop, "TreePlan", counted)
    target = MarkovTarget(vocab_size=4)
    engine = ScriptedEngine(target, Good(target))
    generate(engine, [1, 2], SamplingParams(max_tokens=30, method="ddtree", tree_budget=6))
    assert len(plans) == verbs(engine)["draft"] > 3


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("form", FORMS)
def test_automatic_budgets_weigh_conditionals(form: str, policy: Policy) -> None:
    """The mass tried below a node is that of its children's conditionals; the choice is the best beginning."""
    of = candidates(form, 3)
    plan = RoundPlan([SlotInput(AutoBudget(make_budgets(make_profile(draft_s=0.2), 32, 4)), 0, 99)])
    (ceiling,) = plan.ceilings()
    tree = TreePlan(ceiling, policy).grow(of)
    (nodes,), (decision,) = plan.choose([tree]), plan.decisions
    assert decision is not None and 0 < nodes <= len(tree)
    probabilities = np.exp(tree.log_weights[:nodes])
    assert decision.expected_tokens == pytest.approx(1 + probabilities.sum(), rel=1e-9)
    cut = tree.cut(nodes)
    path = np.array([0, 1], np.int32)
    tried = np.zeros((2, len(path)))
    _native.learn(tried, cut.parents, cut.log_weights, path, 1.0)
    for mass, node, row in zip(tried[1], path.tolist(), (0, children(of, 0)[0][2]), strict=True):
        tokens = set(cut.token_ids[cut.parents[1:] == node].tolist())
        assert mass == pytest.approx(sum(np.exp(p) for p, token, _ in children(of, row) if token in tokens))
