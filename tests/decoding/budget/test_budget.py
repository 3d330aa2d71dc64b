"""Automatic budgets: the rule is optimal for its inputs, the calibration learns, a useless drafter costs little."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import make_profile
from simulated import CPU, MACHINES, random_tree, walk_with

from ddtree_trt import LLM, SamplingParams, _native
from ddtree_trt.device.buckets import buckets
from ddtree_trt.runtime.decoding.budget.automatic import AutoBudget, AutoBudgets
from ddtree_trt.runtime.decoding.budget.base import Decision
from ddtree_trt.runtime.decoding.budget.calibration import HIGHEST, LOWEST, Calibration
from ddtree_trt.runtime.decoding.budget.costs import CostModel
from ddtree_trt.runtime.tree import EMPTY, build_tree


@given(
    weights=st.lists(st.floats(-8, 0), max_size=12).map(lambda w: sorted(w, reverse=True)),
    costs=st.lists(st.floats(0, 3), min_size=13, max_size=13),
    draft_s=st.floats(0, 5),
    ratios=st.lists(st.floats(0.02, 2), min_size=3, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_chosen_prefix_is_the_best_of_all(
    weights: list[float], costs: list[float], draft_s: float, ratios: list[float], seed: int
) -> None:
    depths = np.random.default_rng(seed).integers(1, 4, len(weights)).astype(np.int32)
    verify_s = 1 + np.cumsum(np.sort(costs))  # convex and rising
    scale = np.cumprod([1.0, *ratios])
    nodes, expected = _native.best_prefix(np.array(weights, float), depths, np.array(ratios), draft_s, verify_s)
    accepted = [min(1.0, float(np.exp(w) * scale[d])) for w, d in zip(weights, depths, strict=True)]
    rates = [(1 + sum(accepted[:n])) / (draft_s + verify_s[n]) for n in range(len(weights) + 1)]
    assert rates[nodes] == pytest.approx(max(rates), rel=1e-12)
    assert expected == pytest.approx(1 + sum(accepted[:nodes]))


def test_tried_mass_against_a_plain_statement() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        tree = random_tree(rng, 40, sharp=1.0)
        path = walk_with(rng, tree, 1.0)
        mass = _native.tried_mass(tree.parents, tree.log_weights, path)
        weights = np.concatenate(([0.0], tree.log_weights))
        for node, found in zip(path, mass, strict=True):
            children = np.flatnonzero(tree.parents == node)
            assert found == pytest.approx(float(np.exp(weights[children] - weights[node]).sum()))


@pytest.mark.parametrize("with_parent", [True, False])
def test_ratios_against_a_plain_statement(with_parent: bool) -> None:
    """Observed over predicted, forgotten and shrunk as the module says, over rounds whose walks end everywhere."""
    rng, depth, prior, keep = np.random.default_rng(5), 4, 8.0, 1 - 1 / 48
    parent = Calibration(depth, prior=4, memory=512) if with_parent else None
    calibration = Calibration(depth, prior=prior, memory=48, parent=parent)
    observed, predicted = [0.0] * depth, [0.0] * depth
    for _ in range(100):
        tree = random_tree(rng, 30, depth, sharp=0.3)
        path = walk_with(rng, tree, 1.0)
        priors = None if parent is None else parent.ratios()
        ratios = calibration.ratios()
        expected: list[float] = []
        for d in range(depth):
            towards = priors[d] if priors is not None else expected[-1] if expected else 1.0
            ratio = (prior * towards + observed[d]) / (prior + predicted[d])
            expected.append(min(max(ratio, LOWEST), HIGHEST))
        assert ratios == pytest.approx(expected)
        calibration.observe(tree, path)
        observed, predicted = [keep * o for o in observed], [keep * p for p in predicted]
        for d, mass in enumerate(_native.tried_mass(tree.parents, tree.log_weights, path)):
            if mass > 0:
                predicted[d] += mass
                observed[d] += d + 1 < len(path)


@pytest.mark.parametrize("trust", [1.0, 0.7, 0.3])
def test_calibrated_expectation_meets_what_happens(trust: float) -> None:
    """After 200 rounds, expected and observed tokens per round agree within 5 % for an over-confident drafter."""
    rng = np.random.default_rng(1)
    calibration = Calibration(7, prior=8, memory=512)
    expected = observed = 0.0
    for round_ in range(1200):
        tree = random_tree(rng, 24)
        path = walk_with(rng, tree, trust)
        if round_ >= 200:
            q = np.exp(tree.log_weights) * np.cumprod(calibration.ratios())[tree.depths - 1]
            expected += 1 + np.minimum(q, 1).sum()
            observed += len(path)
        calibration.observe(tree, path)
    assert expected / observed == pytest.approx(1, abs=0.05)


def test_calibration_stays_bounded_under_adversarial_sequences() -> None:
    rng = np.random.default_rng(2)
    parent = Calibration(7, prior=4, memory=512)
    calibration = Calibration(7, prior=8, memory=48, parent=parent)
    for round_ in range(2000):
        tree = random_tree(rng, 16)
        # All accepted down the spine, then nothing at all, switching at growing intervals.
        spine = np.flatnonzero(np.concatenate(([True], tree.depths == np.maximum.accumulate(tree.depths))))
        full = [0]
        for node in spine[1:]:
            if tree.parents[node] == full[-1]:
                full.append(int(node))
        path = np.array(full if int(np.log2(round_ + 1)) % 2 else [0], np.int32)
        calibration.observe(tree, path)
        for ratios in (calibration.ratios(), parent.ratios()):
            assert all(LOWEST <= r <= HIGHEST for r in ratios)


def test_what_is_no_longer_tried_drifts_back_to_the_prior() -> None:
    rng = np.random.default_rng(3)
    calibration = Calibration(7, prior=8, memory=48)
    for _ in range(100):
        calibration.observe(random_tree(rng, 16), np.array([0], np.int32))
    assert calibration.ratios()[0] < 0.3
    for _ in range(2000):
        calibration.observe(build_tree(np.zeros((0, 0)), np.zeros((0, 0)), 0), np.array([0], np.int32))
    assert calibration.ratios() == pytest.approx([1] * 7)


def test_a_depth_never_reached_is_judged_like_the_one_above() -> None:
    calibration = Calibration(7, prior=8, memory=48)
    rng = np.random.default_rng(3)
    for _ in range(100):
        calibration.observe(random_tree(rng, 16), np.array([0], np.int32))
    assert calibration.ratios()[1:] == pytest.approx([calibration.ratios()[0]] * 6)


def run_rounds(auto: AutoBudget, shared: AutoBudgets, tokens: int, trust: float, seed: int) -> tuple[float, int]:
    """(seconds, tokens) of decoding under the profile's own costs."""
    rng = np.random.default_rng(seed)
    spent, made = 0.0, 0
    while made < tokens:
        costs = shared.costs.at(made)
        ceiling = auto.ceiling(made, tokens - made)
        tree = random_tree(rng, ceiling) if ceiling else build_tree(np.zeros((0, 0)), np.zeros((0, 0)), 0)
        if ceiling:
            tree = tree.cut(auto.choose(tree, made))
        path = walk_with(rng, tree, trust)
        auto.observe(tree, path, -1)
        spent += costs.round_s(len(tree)) if ceiling else costs.single_s
        made += len(path)
    return spent, made


def test_a_useless_drafter_falls_back_to_single_tokens() -> None:
    """Over a dozen requests a drafter that is always wrong costs less than 7 %, and most rounds do not draft."""
    shared = AutoBudgets(make_profile(draft_s=1.0), 64, 7)
    spent = made = 0.0
    for request in range(12):
        seconds, tokens = run_rounds(shared.for_sequence(), shared, 100, 0.0, request)
        spent, made = spent + seconds, made + tokens
    assert spent <= made * shared.costs.at(0).single_s / 0.93 * 1.05  # contexts up to 100 cost up to 1.03


def test_drafting_resumes_when_it_pays_again() -> None:
    shared = AutoBudgets(make_profile(), 64, 7)
    run_rounds(shared.for_sequence(), shared, 400, 0.0, 0)
    late = shared.for_sequence()
    run_rounds(late, shared, 600, 1.0, 1)  # the drafter has become good: probes find out
    spent, made = run_rounds(late, shared, 400, 1.0, 2)
    fresh = AutoBudgets(make_profile(), 64, 7)
    best, same = run_rounds(fresh.for_sequence(), fresh, 400, 1.0, 2)
    assert spent / made < 1.1 * best / same


def test_auto_is_about_as_good_as_the_best_fixed_budget() -> None:
    profile = make_profile()

    def fixed(budget: int) -> float:
        costs, rng, spent, made = CostModel(profile, 64, 7), np.random.default_rng(4), 0.0, 0
        while made < 4000:
            tree = random_tree(rng, budget)
            path = walk_with(rng, tree, 0.8)
            spent += costs.at(0).round_s(len(tree))
            made += len(path)
        return made / spent

    shared = AutoBudgets(dataclasses.replace(profile, contexts=profile.contexts[:1]), 64, 7)
    spent, made = run_rounds(shared.for_sequence(), shared, 4000, 0.8, 4)
    assert made / spent >= 0.97 * max(fixed(b) for b in (1, 2, 4, 8, 16, 32, 64))


def test_decisions_explain_themselves() -> None:
    decision = Decision(nodes=8, expected_tokens=5.0, expected_s=0.002, single_token_s=0.001)
    assert decision.expected_gain == pytest.approx(2.5)


def test_auto_is_lossless_and_says_why(tiny_engine: Path) -> None:
    with LLM(tiny_engine) as llm:
        prompt = [{"role": "user", "content": "Lars has 9 keys. Lenlot has double that number. How many has Lenlot?"}]
        truth = llm.generate(prompt, SamplingParams(method="ar", max_tokens=60, ignore_eos=True))[0]
        rounds: list[Any] = []
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        tokens = [t for part in llm.stream(prompt, params, on_round=rounds.append) for t in part.outputs[0].token_ids]
        assert tokens == truth.outputs[0].token_ids
        assert all(r.decision is not None and r.decision.nodes == len(r.tree) for r in rounds)


def test_paid_rows_up_to_the_bucket_are_used() -> None:
    """Where passes are padded, a choice ends at a bucket's end or with the tree, and costs what the bucket does."""
    steps = buckets(65)
    for machine in MACHINES.values():
        shared = AutoBudgets(machine, 64, 15, buckets=steps)
        auto, rng = shared.for_sequence(), np.random.default_rng(0)
        for round_ in range(60):
            most = auto.ceiling(round_, 999)
            tree = random_tree(rng, most, 15, 0.05)
            nodes = auto.choose(tree, round_)
            assert nodes + 1 in steps or nodes == len(tree) <= 64
            assert most + 1 in steps or most == 64
            padded = next(t for t in steps if t > nodes)
            assert shared.costs.at(0).nodes_s[nodes] == pytest.approx(shared.costs.at(0).nodes_s[min(padded - 1, 64)])
            auto.observe(tree.cut(nodes), walk_with(rng, tree.cut(nodes), 1.0), -1)


def test_rows_are_filled_also_with_nodes_that_promise_nothing() -> None:
    weights, depths = np.array([-0.1, -900.0, -900.0, -900.0]), np.ones(4, np.int32)
    filled, costs = np.array([0, 3, 3, 3, 4]), np.array([1.0, 1.1, 1.1, 1.1, 1.5])
    nodes, expected = _native.best_prefix(weights, depths, np.ones(1), 0.1, costs, filled)
    assert nodes == 3 and expected == pytest.approx(1 + np.exp(-0.1))
    assert _native.best_prefix(weights[:2], depths[:2], np.ones(1), 0.1, costs, filled)[0] == 2, (
        "no more than there are"
    )
    assert _native.best_prefix(weights, depths, np.ones(1), 0.1, costs, None, 2)[0] == 2
    with pytest.raises(ValueError, match="filled must have at least n"):
        _native.best_prefix(weights, depths, np.ones(1), 0.1, costs, filled[:2])


def test_a_drafter_that_can_never_pay_is_never_asked() -> None:
    shared = AutoBudgets(make_profile(draft_s=9.0), 64, 7)
    auto = shared.for_sequence()
    assert [auto.ceiling(past, 999) for past in range(300)] == [0] * 300


def test_the_tokens_behind_a_failed_draft_may_bring_drafting_back() -> None:
    """The draft missed its first token and had the next ones: it is tried again; had it nothing, it is not."""
    for foreseen in (True, False):
        shared = AutoBudgets(CPU, 64, 15)
        auto = shared.for_sequence()
        ids = np.tile(np.arange(10, 26, dtype=np.int32)[:, None], (1, 2)) + np.array([0, 100], np.int32)
        tree = build_tree(np.log([[0.9, 0.1]] * 15), ids[:15], auto.ceiling(0, 999))
        auto.observe(tree.cut(auto.choose(tree, 0)), np.array([0], np.int32), 7)
        assert auto.ceiling(1, 999) == 0
        auto.observe(EMPTY, np.array([0], np.int32), 11 if foreseen else 7)
        assert (auto.ceiling(2, 999) > 0) is foreseen
