"""What passes cost: the curve through measured latencies, the profile in its file, and what an engine pads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import make_profile
from scripted import ScriptedEngine
from scripted_models import MarkovTarget, Useless

from ddtree_trt import LLM
from ddtree_trt.artifact.files import PROFILE
from ddtree_trt.runtime.decoding import latency as profiles
from ddtree_trt.runtime.decoding.costs import CostModel
from ddtree_trt.runtime.decoding.latency import ContextCost, LatencyProfile, convex_fit, measure


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


def test_the_profile_round_trips() -> None:
    profile = make_profile()
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
