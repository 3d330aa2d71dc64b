"""How long rounds take against the profile, as it is learnt from them: a plain Kalman filter is the truth, and machines
are slower than measured with drafts, without them, or for one round. No clock is read."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ddtree_trt.runtime.decoding.budget.pace import (
    DRIFT,
    DRIFT_SHARED,
    MOST,
    NOISE,
    PRIOR,
    PRIOR_SHARED,
    SURPRISE,
    Pace,
)


def learnt(kinds: list[int], ratios: list[float]) -> Pace:
    pace = Pace()
    for kind, ratio in zip(kinds, ratios, strict=True):
        pace.learn(bool(kind), ratio)
    return pace


def test_it_is_a_kalman_filter_of_two_states() -> None:
    rng = np.random.default_rng(5)
    kinds = rng.integers(0, 2, 60).tolist()
    logs = rng.normal(0.1, 0.05, 60)
    shared = np.array([[0.0, 1.0], [1.0, 0.0]])
    state, covariance = np.zeros(2), PRIOR**2 * (np.eye(2) + PRIOR_SHARED * shared)
    for kind, log in zip(kinds, logs, strict=True):
        sees = np.eye(2)[kind : kind + 1]  # [1, 2]
        covariance = covariance + DRIFT**2 * (np.eye(2) + DRIFT_SHARED * shared)
        gain = covariance @ sees.T / (sees @ covariance @ sees.T + NOISE**2)
        state = state + (gain * (log - sees @ state)).ravel()
        covariance = (np.eye(2) - gain @ sees) @ covariance
    ratios = learnt(kinds, np.exp(logs).tolist()).ratios
    assert ratios == pytest.approx(np.exp(state), abs=0.006), "to a hundredth"


def test_each_kind_of_round_is_learnt() -> None:
    rng = np.random.default_rng(1)
    kinds = [i % 2 for i in range(200)]
    pace = learnt(kinds, [(1.5, 1.2)[kind] * math.exp(rng.normal(0, 0.1)) for kind in kinds])
    assert pace.ratios.single == pytest.approx(1.5, rel=0.06)
    assert pace.ratios.drafted == pytest.approx(1.2, rel=0.06)
    assert pace.ratios.dearness == pytest.approx(0.8, rel=0.06)


def test_rounds_as_measured_change_nothing() -> None:
    assert learnt([0, 1, 1, 0], [1.0] * 4).ratios == Pace().ratios == (1.0, 1.0)


@pytest.mark.parametrize("kind", [0, 1])
def test_a_slow_machine_is_believed_of_the_kind_that_was_not_seen(kind: int) -> None:
    """When all is three times slower, only one kind of round sees it, and drafting pays as before."""
    pace = learnt([0, 1] * 20, [1.0] * 40)
    for _ in range(300):
        pace.learn(bool(kind), 3.0)
    assert pace.ratios[kind] == pytest.approx(3.0, rel=0.02)
    assert 2.4 < pace.ratios[1 - kind] < 3.0


def test_one_round_that_waited_moves_little() -> None:
    pace = learnt([0, 1] * 50, [1.0] * 100)
    pace.learn(False, 1000.0)
    assert 1.0 < pace.ratios.single < 1.1
    at_first = learnt([1], [1000.0]).ratios
    assert 1.2 < at_first.drafted <= round(math.exp(SURPRISE), 2)


def test_it_stays_within_bounds() -> None:
    for ratio in (1e-9, 1e9):
        ratios = learnt([0, 1] * 300, [ratio] * 600).ratios
        assert all(abs(math.log(each)) <= MOST + 0.03 for each in ratios)


def test_rounds_without_drafts_are_hoped_for_until_they_are_known() -> None:
    pace = Pace()
    assert pace.hope == 1.0, "neither is known"
    for _ in range(2):
        pace.learn(True, 1.0)
    assert 1.1 < pace.hope < 1.3
    for _ in range(5):
        pace.learn(False, 1.0)
    assert pace.hope == 1.0
    for _ in range(5000):
        pace.learn(True, 1.0)
    assert pace.hope > 1.1, "long ago"


def test_one_may_begin_like_another() -> None:
    known = learnt([0, 1] * 20, [2.0] * 40)
    other = Pace(known)
    assert other.ratios == known.ratios
    for _ in range(2):
        other.learn(True, 1.0)
    assert other.ratios.drafted < known.ratios.drafted < 2.1
