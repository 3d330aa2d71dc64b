"""What passes cost: the curve through measured latencies, the profile in its file, and what an engine pads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import make_batched_profile, make_profile
from scripted import ScriptedEngine
from scripted_models import MarkovTarget, Useless

from ddtree_trt import LLM
from ddtree_trt.artifact.files import PROFILE
from ddtree_trt.runtime.decoding.budget import latency as profiles
from ddtree_trt.runtime.decoding.budget.costs import CostModel, Load
from ddtree_trt.runtime.decoding.budget.latency import ContextCost, LatencyProfile, convex_fit, measure


@given(st.lists(st.floats(0, 100), min_size=2, max_size=10), st.integers(0, 2**32 - 1))
def test_convex_fit_is_convex_and_rising_and_keeps_convex_data(values: list[float], seed: int) -> None:
    x = np.cumsum(np.random.default_rng(seed).uniform(0.5, 5, len(values)))
    y = np.array(values)
    fitted = convex_fit(x, y)
    slopes = np.diff(fitted) / np.diff(x)
    assert np.all(slopes >= -1e-9)
    assert np.all(np.diff(slopes) >= -1e-6 * (1 + np.abs(slopes[:-1])))
    convex = np.concatenate(([0.0], np.cumsum(np.sort(np.abs(np.diff(y))))))
    straight = convex * 0
    straight[1:] = np.cumsum(np.sort(np.abs(np.diff(y)) / np.diff(x)) * np.diff(x))
    assert convex_fit(x, straight) == pytest.approx(straight, abs=1e-6)


def test_the_cost_model_interpolates_contexts_and_sizes() -> None:
    model = CostModel(make_profile(), 100, 7)
    short, long, between = model.at(0), model.at(10_000), model.at(512)
    assert short.single_s == pytest.approx(1.0)
    assert long.single_s == pytest.approx(1.5)
    assert short.single_s < between.single_s < long.single_s
    assert short.nodes_s[7] == pytest.approx(1.35)
    assert short.nodes_s[100] == pytest.approx(6.0), "past the last measured size the last slope goes on"


def test_costs_of_several_slots_follow_rows_and_slots() -> None:
    """As measured at one context, between the numbers of slots that were, and in proportion beyond them."""
    profile = make_batched_profile(8, draft_s=0.5, slope=0.01)
    model = CostModel(profile, 64, 7)
    for slots, nodes in ((2, 0), (2, 8), (8, 4), (8, 64)):
        found = model.round(0, slots).verify_s[nodes]
        assert found == pytest.approx(1 + 0.01 * (slots * (1 + nodes) - 1))
    assert model.round(0, 6).verify_s[8] == pytest.approx(1 + 0.01 * (6 * 9 - 1))
    assert model.round(0, 16).verify_s[8] == pytest.approx(2 * model.round(0, 8).verify_s[8])
    assert model.round(0, 8).draft_s == pytest.approx([0.0, *(0.5 * (0.8 + 0.2 * n) for n in range(1, 9))])


def test_a_longer_context_adds_for_every_slot_what_it_adds_for_one() -> None:
    short = make_batched_profile(4)
    long = dataclasses.replace(
        short.contexts[0], context=4096, draft_s=0.3, verify_s=tuple(s + 0.25 for s in short.contexts[0].verify_s)
    )
    model = CostModel(dataclasses.replace(short, contexts=(short.contexts[0], long)), 64, 7)
    near, far = model.round(0, 4), model.round(9000, 4)
    assert far.verify_s == pytest.approx(near.verify_s + 4 * 0.25)
    assert far.draft_s[1:] == pytest.approx(near.draft_s[1:] + 0.1 * np.arange(1, 5))


def test_a_shorter_context_than_that_of_several_slots_costs_the_same() -> None:
    """What one slot seems to save there, times the number of slots, is mostly noise."""
    batched = make_batched_profile(4)
    at_first = dataclasses.replace(batched.contexts[0], verify_s=tuple(s / 2 for s in batched.contexts[0].verify_s))
    second, many = (dataclasses.replace(cost, context=256) for cost in (batched.contexts[0], batched.batches[-1]))
    model = CostModel(dataclasses.replace(batched, contexts=(at_first, second), batches=(many,)), 64, 7)
    assert model.round(0, 4).verify_s == pytest.approx(model.round(192, 4).verify_s)
    assert model.at(0).single_s < model.at(192).single_s, "of one slot it was measured"


def test_the_times_of_rounds_correct_the_costs_of_several_slots() -> None:
    model = CostModel(make_batched_profile(8), 64, 7)
    before, alone = model.round(0, 8), model.at(0)
    for _ in range(60):
        model.learn(0, 8, 0, 0, 1.5 * before.verify_s[0])
        model.learn(0, 8, 5, 9, 1.2 * (before.draft_s[5] + before.verify_s[9]))
    after = model.round(0, 8)
    assert after.verify_s[0] == pytest.approx(1.5 * before.verify_s[0], rel=0.02)
    assert after.verify_s[1:] == pytest.approx(1.2 * before.verify_s[1:], rel=0.02)
    assert after.draft_s == pytest.approx(1.2 * before.draft_s, rel=0.02)
    assert after.dearness == model.at(0, None, Load(8, 8)).dearness == pytest.approx(0.8, rel=0.02)
    assert model.at(0) is alone, "one slot's are those of the profile"


def test_what_is_learnt_holds_for_like_numbers_of_slots_and_begins_others() -> None:
    model = CostModel(make_batched_profile(8), 64, 7)
    before = {slots: model.round(0, slots).verify_s[0] for slots in (2, 6, 7, 8)}
    for _ in range(60):
        model.learn(0, 7, 0, 0, 2 * before[7])
    known = CostModel(make_batched_profile(8), 64, 7)
    known.learn(0, 7, 0, 0, known.round(0, 7).verify_s[0])  # so that only this number is known
    for _ in range(60):
        known.learn(0, 7, 0, 0, 2 * before[7])
    assert known.round(0, 6).verify_s[0] == pytest.approx(2 * before[6], rel=0.02)
    assert known.round(0, 2).verify_s[0] == pytest.approx(2 * before[2], rel=0.02), "as the nearest one known"
    assert model.round(0, 8).verify_s[0] == pytest.approx(before[8]), "it was known before"


@pytest.mark.parametrize("paced", [False, True])
@pytest.mark.parametrize(("slots", "drafting"), [(1, 1), (4, 4), (8, 3)])
def test_the_share_of_a_slot(slots: int, drafting: int, paced: bool) -> None:
    """Of single tokens one part for each slot, of drafts and their rows one for each that drafts."""
    model = CostModel(make_batched_profile(8), 64, 7)
    if paced and slots > 1:
        model.learn(0, slots, 0, 0, 1.1 * model.round(0, slots).verify_s[0])
    share, whole = model.at(0, None, Load(slots, drafting)), model.round(0, slots)
    assert share.single_s == pytest.approx(whole.verify_s[0] / slots)
    for nodes in (1, 5, 64):
        silent = (slots - drafting) * share.single_s
        assert drafting * share.round_s(nodes) + silent == pytest.approx(
            whole.draft_s[drafting] + whole.verify_s[nodes]
        )


def test_without_costs_of_several_slots_a_pass_takes_as_long_as_one_for_each() -> None:
    model = CostModel(make_profile(), 64, 7)
    assert model.round(0, 3).verify_s == pytest.approx(3 * model.at(0).nodes_s)
    assert model.at(0, None, Load(3, 3)).nodes_s == pytest.approx(model.at(0).nodes_s)


def test_the_profile_round_trips() -> None:
    for profile in (make_profile(), make_batched_profile(8)):
        assert LatencyProfile.from_json(profile.to_json()) == profile


def test_a_foreign_profile_is_measured_again(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = LatencyProfile.from_json((tiny_engine / PROFILE).read_text())
    measured = []

    def measure(engine: object, **_: object) -> LatencyProfile:
        measured.append(engine)
        return stored

    monkeypatch.setattr(profiles, "measure", measure)
    try:
        LLM(tiny_engine).close()
        assert not measured, "the build's own profile fits"
        foreign = dataclasses.replace(stored, fingerprint="another machine")
        (tiny_engine / PROFILE).write_text(foreign.to_json())
        LLM(tiny_engine).close()
        assert LatencyProfile.from_json((tiny_engine / PROFILE).read_text()) == stored
        assert len(measured) == 1
        LLM(tiny_engine, threads=2).close()
        assert len(measured) == 2, "another thread count is another machine"
    finally:
        (tiny_engine / PROFILE).write_text(stored.to_json())


@given(st.lists(st.floats(1e-4, 1e-1), min_size=1, max_size=8), st.integers(1, 80))
def test_a_curve_is_monotone_and_convex_whatever_was_measured(costs: list[float], largest: int) -> None:
    """No tree is cheaper than a single token, also where noise said so."""
    sizes = (1, 2, 3, 5, 9, 17, 33, 65)[: len(costs)]
    curve = ContextCost(64, 1e-3, sizes, tuple(costs)).verify_curve(largest)
    assert curve.shape == (largest + 1,) and curve[0] == costs[0]
    steps = np.diff(curve)
    assert (steps >= -1e-12).all() and (np.diff(steps[1:]) >= -1e-9).all()


def test_measured_profile_is_plausible_and_leaves_the_engine_empty(tiny_engine: Path) -> None:
    with LLM(tiny_engine) as llm:
        profile = measure(llm.engine, seconds=0.2)
        assert llm.engine.length(0) == 0
    for cost in profile.contexts:
        assert cost.tree_tokens[0] == 1 and len(cost.tree_tokens) >= 2
        assert 0 < cost.draft_s < float("inf")
        curve = cost.verify_curve(64)
        assert np.all(np.diff(curve[1:]) >= 0) and curve[1] >= curve[0] > 0


def test_an_engine_that_pads_is_measured_at_the_sizes_it_pads_to() -> None:
    engine = ScriptedEngine(MarkovTarget(), Useless(6))
    engine.buckets = [1, 2, 4, 8, 16, 32, 48, 65]
    sizes = measure(engine, seconds=0.0).contexts[0].tree_tokens
    assert set(sizes) <= set(engine.buckets)


def test_a_drafted_token_has_its_own_cost_where_tokens_are_drafted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(MarkovTarget(), Useless(6), kind="autoregressive")
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def spend(verb: str, slots: tuple[int, ...]) -> None:
        call = engine.calls[-1]
        clock[0] += {"draft": 0.5 + 0.25 * call.tokens, "verify": 1.0 + 0.1 * call.tokens}.get(verb, 0.0)

    engine.fail = spend
    (cost,) = measure(engine, seconds=0.0).contexts
    assert cost.draft_s == pytest.approx(0.5) and cost.draft_token_s == pytest.approx(0.25)


def test_an_engine_that_batches_is_measured_with_several_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """In passes over all of them, at the numbers that are powers of two, and at most slots; all are empty after it."""
    engine = ScriptedEngine(MarkovTarget(), Useless(6), max_batch=6)
    assert measure(engine, seconds=0.0).batches == (), "it takes one slot after the other"
    engine.batches = True
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def spend(verb: str, slots: tuple[int, ...]) -> None:
        rows = engine.calls[-1].tokens * len(slots)
        clock[0] += {"draft": 1e-4 * len(slots), "verify": 1e-3 + 1e-6 * rows}.get(verb, 0.0)

    engine.fail = spend
    profile = measure(engine, seconds=0.0)
    assert [cost.slots for cost in profile.batches] == [2, 4, 6]
    for cost in profile.batches:
        assert cost.draft_s == pytest.approx(1e-4 * cost.slots)
        assert cost.verify_s == pytest.approx([1e-3 + 1e-6 * cost.slots * t for t in cost.tree_tokens])
    assert [engine.length(slot) for slot in range(6)] == [0] * 6
    model = CostModel(profile, 64, 3)
    assert model.round(0, 6).verify_s[8] == pytest.approx(1e-3 + 1e-6 * 6 * 9)


def test_measuring_several_slots_takes_seconds_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """In simulated time: numbers of slots that would take long are left out."""
    spent = {}
    for pass_s in (0.001, 0.1, 2.0):
        engine = ScriptedEngine(MarkovTarget(), Useless(6), max_batch=16)
        clock = [0.0]
        with monkeypatch.context() as patch:
            patch.setattr("time.perf_counter", lambda clock=clock: clock[0])

            def spend(verb: str, slots: tuple[int, ...], clock: list[float] = clock, pass_s: float = pass_s) -> None:
                clock[0] += pass_s * len(slots)

            engine.fail = spend
            measure(engine, seconds=0.0)
            alone = clock[0]
            engine.batches = True
            profile = measure(engine, seconds=0.0)
            spent[pass_s] = (clock[0] - 2 * alone, [cost.slots for cost in profile.batches])
    assert spent[0.001][1][-1] == 16 and len(spent[0.001][1]) > 2 and spent[2.0][1] == []
    assert all(seconds < 60 for seconds, _ in spent.values())
