"""Automatic budgets of slots in one pass: the choice is the best of all, shares add up, and a slot alone is as ever."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import make_batched_profile, make_profile
from scripted import ScriptedEngine, completion, finish
from scripted_models import Good, MarkovTarget
from simulated import CPU, GPU, random_tree, walk_with

from ddtree_trt import SamplingParams, _native
from ddtree_trt.device.buckets import buckets
from ddtree_trt.runtime.decoding.budget.automatic import AutoBudget, AutoBudgets
from ddtree_trt.runtime.decoding.budget.base import Budget, FixedBudget
from ddtree_trt.runtime.decoding.budget.crowd import Plan, Turn, plan
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.tree import EMPTY, DraftTree

NODES, DEPTH = 64, 7


@given(
    trees=st.lists(st.lists(st.floats(-6, 0), max_size=9), min_size=1, max_size=5),
    steps=st.lists(st.floats(0, 2), min_size=10, max_size=10),
    draft_s=st.floats(0, 4),
    ratios=st.lists(st.floats(0.02, 2), min_size=3, max_size=3),
    padded=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_chosen_rows_are_the_best_of_all(
    trees: list[list[float]], steps: list[float], draft_s: float, ratios: list[float], padded: bool, seed: int
) -> None:
    """Of any trees, also such as calibration has put out of order, at costs that are not convex."""
    rng = np.random.default_rng(seed)
    verify_s = 1 + np.cumsum([0.0, *steps])
    sizes = [0, 1, 3, 7, 10]
    filled = np.array([next(s for s in sizes if s >= n) for n in range(11)]) if padded else np.arange(11)
    verify_s = verify_s[filled]
    accepted, gains = [], np.zeros(max(map(len, trees)))
    for weights in trees:
        depths = rng.integers(1, 4, len(weights)).astype(np.int32)
        found = _native.acceptances(np.array(weights, float), depths, np.array(ratios))
        assert found == pytest.approx(
            [min(1, np.exp(w) * np.prod(ratios[:d])) for w, d in zip(weights, depths, strict=True)]
        )
        gains[: len(found)] += found
        accepted.append(found)
    rows, expected = _native.best_rows(gains, float(len(trees)), draft_s, verify_s, filled)

    def tokens(n: int) -> float:
        return len(trees) + sum(float(each[:n].sum()) for each in accepted)

    rates = [tokens(n) / (draft_s + verify_s[n]) for n in range(len(gains) + 1)]
    assert tokens(rows) / (draft_s + verify_s[rows]) == pytest.approx(max(rates))
    assert expected == pytest.approx(tokens(rows))


def test_one_tree_is_chosen_from_as_by_the_rule_for_one() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        tree, ratios, costs = random_tree(rng, 40), rng.uniform(0.1, 2, DEPTH), 1 + np.cumsum(rng.random(41))
        arguments = float(rng.random()), costs, None, int(rng.integers(0, 5))
        gains = _native.acceptances(tree.log_weights, tree.depths, ratios)
        one = _native.best_prefix(tree.log_weights, tree.depths, ratios, *arguments)
        assert _native.best_rows(gains, 1.0, *arguments) == one


class Slots:
    """Sequences whose drafter is right with `trust` times its own probabilities, round by round."""

    def __init__(self, budgets: list[Budget], trust: float = 1.0, *, one_pass: bool = True, seed: int = 0) -> None:
        self.budgets, self.trust, self._one_pass = budgets, trust, one_pass
        self._rngs = [np.random.default_rng(seed + i) for i in range(len(budgets))]
        self.past = 0
        self.trees: list[DraftTree] = []

    def round(self) -> Plan:
        budgets = plan([Turn(budget, self.past, 999) for budget in self.budgets], one_pass=self._one_pass)
        drafts = [
            random_tree(rng, n, DEPTH) if n else None for rng, n in zip(self._rngs, budgets.ceilings(), strict=True)
        ]
        self.trees = [
            EMPTY if tree is None else tree.cut(n) for tree, n in zip(drafts, budgets.choose(drafts), strict=True)
        ]
        for budget, tree, rng in zip(self.budgets, self.trees, self._rngs, strict=True):
            budget.observe(tree, walk_with(rng, tree, self.trust), -1)
        self.past += 1
        return budgets

    def sizes(self, rounds: int) -> list[list[int]]:
        found = []
        for _ in range(rounds):
            self.round()
            found.append([len(tree) for tree in self.trees])
        return found


@pytest.mark.parametrize("trust", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("slots", "one_pass"), [(1, True), (1, False), (4, False)])
def test_alone_or_one_after_the_other_every_slot_chooses_for_itself(trust: float, slots: int, one_pass: bool) -> None:
    """To the node, over rounds that stop, probe and resume."""
    for profile in (CPU, GPU, make_profile()):
        planned, plain = AutoBudgets(profile, NODES, DEPTH), AutoBudgets(profile, NODES, DEPTH)
        sizes = Slots([planned.for_sequence() for _ in range(slots)], trust, one_pass=one_pass).sizes(80)
        budgets, rngs = [plain.for_sequence() for _ in range(slots)], [np.random.default_rng(i) for i in range(slots)]
        for past, expected in enumerate(sizes):
            ceilings = [budget.ceiling(past, 999) for budget in budgets]
            trees = [random_tree(rng, n, DEPTH) if n else EMPTY for rng, n in zip(rngs, ceilings, strict=True)]
            nodes = [b.choose(tree, past) if n else 0 for b, tree, n in zip(budgets, trees, ceilings, strict=True)]
            trees = [tree.cut(n) for tree, n in zip(trees, nodes, strict=True)]
            for budget, tree, rng in zip(budgets, trees, rngs, strict=True):
                budget.observe(tree, walk_with(rng, tree, trust), -1)
            assert nodes == expected


@pytest.mark.parametrize("free_rows", [1, 500])
@pytest.mark.parametrize("single", [0.8, 1.0, 1.4])
@pytest.mark.parametrize("slots", [2, 5, 8])
def test_the_shares_of_a_round_add_up_to_it(slots: int, single: float, free_rows: int) -> None:
    """Also where rounds without drafts take another time than the profile says, and where rows cost nothing."""
    shared = AutoBudgets(make_batched_profile(8, free_rows=free_rows), NODES, DEPTH)
    profiled = shared.costs.round(0, slots)
    for _ in range(40):
        shared.costs.learn(0, slots, 0, 0, single * profiled.verify_s[0])
        shared.costs.learn(0, slots, slots, 4, profiled.round_s(slots, 4))
    crowd = Slots([shared.for_sequence() for _ in range(slots)])
    drafted = 0
    for _ in range(20):
        crowd.round()
        decisions = [budget.last for budget in crowd.budgets]
        costs, widest = shared.costs.round(crowd.past, slots), max(len(tree) for tree in crowd.trees)
        drafting = sum(d is not None and d.drafted for d in decisions)
        spent = sum(d.expected_s for d in decisions if d is not None)
        assert spent == pytest.approx(costs.draft_s[drafting] + costs.verify_s[widest], rel=1e-6)
        drafted += drafting
    assert drafted > (10 if single >= 1 else 1) * slots


def test_rows_that_are_paid_for_are_used_by_all() -> None:
    steps = buckets(1 + NODES)
    shared = AutoBudgets(make_batched_profile(4), NODES, DEPTH, buckets=steps)
    crowd = Slots([shared.for_sequence() for _ in range(4)])
    for sizes in crowd.sizes(20)[1:]:
        assert len(set(sizes)) == 1 and sizes[0] + 1 in steps


def test_the_rows_of_a_fixed_budget_are_used_by_the_others() -> None:
    """They cost nothing more: a slot that drafts has as many nodes, however dear rows are, once it has gained."""

    def make_slots(*others: Budget) -> Slots:
        shared = AutoBudgets(make_batched_profile(4, slope=0.1), NODES, DEPTH)
        return Slots([*others, *(shared.for_sequence() for _ in range(3))])

    alone, mixed = make_slots().sizes(20)[5:], make_slots(FixedBudget(16)).sizes(20)[5:]
    assert max(map(max, alone)) < 16
    assert {n for sizes in mixed for n in sizes} == {16}


def test_load_makes_trees_smaller_and_ends_drafting() -> None:
    def mean(slots: int, trust: float) -> float:
        shared = AutoBudgets(make_batched_profile(64, free_rows=32), NODES, DEPTH)
        sizes = Slots([shared.for_sequence() for _ in range(slots)], trust).sizes(24)
        return float(np.mean(sizes[8:]))

    good, poor = [[mean(slots, trust) for slots in (1, 4, 16, 64)] for trust in (1.0, 0.4)]
    for sizes in (good, poor):
        assert all(few >= many for few, many in pairwise(sizes)) and sizes[0] > 4 * sizes[-1]
    assert good[-1] < 0.2 and poor[-1] < 0.2 and sum(poor) < sum(good)


def test_what_load_ended_goes_on_when_it_falls() -> None:
    """Whether requests have stopped, as here all have, or were put off."""
    shared = AutoBudgets(make_batched_profile(64, draft_s=0.6, free_rows=64), NODES, DEPTH)
    crowd = Slots([shared.for_sequence() for _ in range(64)], 0.5)
    assert np.mean(crowd.sizes(20)[10:]) < 0.5
    crowd.trust = 1.0
    assert np.mean(crowd.sizes(4)) < 0.5, "nobody drafts, so nobody knows"
    crowd.budgets = crowd.budgets[:2]
    crowd._rngs = crowd._rngs[:2]
    assert np.mean(crowd.sizes(12)[4:]) > 4


def test_a_slot_whose_drafts_fail_stops_beside_others_that_go_on() -> None:
    shared = AutoBudgets(make_batched_profile(4, free_rows=32), NODES, DEPTH)
    crowd = Slots([shared.for_sequence() for _ in range(4)])
    for round_ in range(60):
        planned = plan([Turn(budget, round_, 999) for budget in crowd.budgets], one_pass=True)
        drafts = [
            random_tree(np.random.default_rng([round_, i]), n, DEPTH) if n else None
            for i, n in enumerate(planned.ceilings())
        ]
        for i, (tree, n) in enumerate(zip(drafts, planned.choose(drafts), strict=True)):
            cut = EMPTY if tree is None else tree.cut(n)
            path = walk_with(np.random.default_rng([7, round_, i]), cut, 0.0 if i == 2 else 1.0)
            crowd.budgets[i].observe(cut, path, -1)
        if round_ >= 20:
            assert all(tree is not None for i, tree in enumerate(drafts) if i != 2)
            assert round_ < 59 or drafts[2] is None


def test_repeatable_budgets_do_not_depend_on_other_slots() -> None:
    def sizes(others: int) -> list[int]:
        shared = AutoBudgets(make_batched_profile(8), 16, DEPTH, chains=True)
        budgets: list[Budget] = [shared.for_sequence(alone=True), *(shared.for_sequence() for _ in range(others))]
        found = []
        for past in range(20):
            planned = plan([Turn(budget, past, 999) for budget in budgets], one_pass=True)
            found.append(planned.ceilings()[0])
        return found

    assert sizes(0) == sizes(7)


@pytest.mark.parametrize("method", ["ddtree", "mixed"])
def test_the_loop_gives_slots_of_one_pass_a_common_size_and_stays_lossless(method: str) -> None:
    """Over the scripted engine, whose passes check what they are asked."""
    outputs = {}
    for automatic in (False, True):
        engine = ScriptedEngine(target := MarkovTarget(), Good(target))
        engine.batches = automatic
        shared = AutoBudgets(make_batched_profile(4), 64, 3)
        params = [SamplingParams(method="ddtree", max_tokens=30)] * 4
        if method == "mixed":
            params[1] = SamplingParams(method="ar", max_tokens=30)
        completions = [completion(engine, [1 + i], each) for i, each in enumerate(params)]
        widths: list[set[int]] = []
        for each in completions:
            if each.drafts:
                each.budget = shared.for_sequence() if automatic else FixedBudget(0)
        scheduler = Scheduler(engine)
        verify = engine.verify

        def watched(requests: object, verify: object = verify, widths: list[set[int]] = widths) -> object:
            widths.append({len(r.tree) for r in requests})  # type: ignore[attr-defined]
            return verify(requests)  # type: ignore[operator]

        engine.verify = watched  # type: ignore[method-assign, assignment]
        finish(scheduler, completions)
        outputs[automatic] = [each.output for each in completions]
        if automatic:
            assert max(max(sizes) for sizes in widths) > 2
            assert all(isinstance(each.budget, AutoBudget) for each in completions if each.drafts)
    assert outputs[True] == outputs[False]


def test_the_loop_times_its_rounds_for_the_costs_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """In simulated time, on a machine where every pass takes twice as long as the profile says."""
    engine = ScriptedEngine(target := MarkovTarget(), Good(target))
    engine.batches = True
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def spend(verb: str, slots: tuple[int, ...]) -> None:
        rows = engine.calls[-1].tokens * len(slots)
        pass_s = {"draft": 0.2 * (0.8 + 0.2 * len(slots)), "verify": 1 + 0.02 * (rows - 1)}
        clock[0] += 2 * pass_s.get(verb, 0.0)

    engine.fail = spend
    shared = AutoBudgets(make_batched_profile(4), 64, 3)
    completions = [completion(engine, [1 + i], SamplingParams(method="ddtree", max_tokens=90)) for i in range(4)]
    for each in completions:
        each.budget = shared.for_sequence()
    profiled = shared.costs.round(0, 4)
    finish(Scheduler(engine), completions)
    learnt = shared.costs.round(0, 4)
    assert learnt.draft_s[1:] / profiled.draft_s[1:] == pytest.approx(2.0, rel=0.05)
    assert 1.5 < learnt.verify_s[0] / profiled.verify_s[0] < 2.05


@pytest.mark.parametrize("by_levels", [False, True])
def test_rounds_whose_drafts_differ_in_length_correct_nothing(by_levels: bool) -> None:
    """What a drafted token or level takes is not in the costs of a round: such rounds would all look too long."""
    shared = AutoBudgets(make_batched_profile(8), NODES, DEPTH, chains=not by_levels, by_levels=by_levels)
    budgets: list[Budget] = [shared.for_sequence() for _ in range(4)]
    before = shared.costs.round(0, 4).verify_s[0]
    for past in range(20):
        planned = plan([Turn(budget, past, 999) for budget in budgets], one_pass=True)
        planned.ceilings()
        planned.took(5.0, 6)
    assert shared.costs.round(0, 4).verify_s[0] == before
