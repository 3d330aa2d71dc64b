"""What automatic budgets may cost, in simulated time: poor requests take nothing from good ones, and little at all."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated import CHAINS, CPU, GOOD, GPU, LIAR, SLOW_CPU, UNSURE, Machine, Quality, Request, Spent, total

from ddtree_trt.runtime.decoding.budget.account import SHARE, STAKE, TRIAL

MACHINES = {"cpu": (CPU, False), "gpu": (GPU, False), **{name: (costs, True) for name, costs in CHAINS.items()}}
PROFILES = MACHINES | {"slow-cpu": (SLOW_CPU, False)}
TREES = ("cpu", "gpu")
STEEP = (*TREES, "small")  # on the others γ of 2 and of 3 are about as fast, so that tokens a round say little
FIXED = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)
POOR = {"liar": LIAR, "unsure": UNSURE}


def machine(name: str, slots: int = 1) -> Machine:
    profile, chains = PROFILES[name]
    return Machine(profile, chains=chains, slots=slots)


def good_requests(count: int, tokens: int = 64, seed: int = 1000) -> list[Request]:
    return [Request(GOOD, tokens, seed + i) for i in range(count)]


def per_round(parts: list[Spent]) -> float:
    spent = total(parts)
    return spent.tokens / spent.rounds


def per_second(parts: list[Spent]) -> float:
    spent = total(parts)
    return spent.tokens / spent.seconds


@functools.cache
def on_fresh(name: str, count: int, tokens: int) -> list[Spent]:
    """Good requests on an engine that has seen nothing."""
    return machine(name).run(good_requests(count, tokens))


def fresh(name: str, count: int, tokens: int) -> float:
    """Tokens a round of good requests on an engine that has seen nothing."""
    return per_round(on_fresh(name, count, tokens))


poor_requests = st.lists(
    st.builds(
        Request,
        st.builds(Quality, st.sampled_from([0.0, 0.05, 0.1]), st.sampled_from([0.005, 0.02, 0.1, 1.0])),
        st.integers(1, 300),
        st.integers(0, 10**6),
    ),
    max_size=30,
)


LUCKY = [  # the fifth drafts for long enough to have gained a little now and then
    *(Request(Quality(0.0, 0.005), tokens, seed) for tokens, seed in ((266, 827), (147, 2953), (122, 431))),
    Request(Quality(0.05, 0.02), 266, 827),
    Request(Quality(0.1, 0.005), 58, 827),
    Request(Quality(0.05, 0.1), 147, 1763),
]


@pytest.mark.parametrize("name", MACHINES)
@example(history=LUCKY, slots=4)
@given(history=poor_requests, slots=st.integers(1, 4))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_good_requests_draft_whatever_went_before(name: str, history: list[Request], slots: int) -> None:
    used = machine(name, slots)
    used.run(history)
    used.slots = 1
    parts = used.run(good_requests(20))
    assert per_second(parts) >= 0.95 * per_second(on_fresh(name, 20, 64))
    if name in STEEP:
        assert per_round(parts) >= 0.95 * fresh(name, 20, 64)


def test_requests_that_gained_by_luck_teach_the_engine_nothing() -> None:
    used = machine("small", slots=4)
    before = used.auto.calibration.ratios()
    used.run(LUCKY)
    np.testing.assert_array_equal(used.auto.calibration.ratios(), before)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("poor", "tokens", "good", "answer"), [(5, 48, 20, 64), (1, 300, 100, 120)])
def test_one_or_five_poor_requests_first(name: str, poor: int, tokens: int, good: int, answer: int) -> None:
    used = machine(name)
    used.run(Request(LIAR, tokens, i) for i in range(poor))
    assert per_round(used.run(good_requests(good, answer))) >= 0.95 * fresh(name, good, answer)


@pytest.mark.parametrize("name", MACHINES)
def test_short_answers_half_of_them_poor(name: str) -> None:
    requests = [r for i, g in enumerate(good_requests(40, 24)) for r in (Request(LIAR, 24, i), g)]
    assert per_round(machine(name).run(requests)[1::2]) >= 0.95 * fresh(name, 40, 24)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("poor", POOR)
@pytest.mark.parametrize("slots", [1, 4])
def test_a_useless_drafter_costs_little_of_48_tokens(name: str, poor: str, slots: int) -> None:
    spent = total(machine(name, slots).run(Request(POOR[poor], 48, i) for i in range(40)))
    assert spent.tokens / spent.seconds >= 0.95  # ar makes one token a second


@functools.cache
def in_hindsight(name: str, request: Request) -> float:
    """Seconds of the better of `ar` and the fixed budget that turns out best for this very request."""
    one = machine(name)
    budgets = [n for n in FIXED if n <= one.auto.max_nodes]
    return min(float(request.tokens), *(one.fixed(request, n).seconds for n in budgets))


MIDDLING = {f"trust {t}": Quality(t) for t in (0.5, 0.6, 0.7)}
SLOW = {("small", "trust 0.5"): 1.07, ("small", "trust 0.6"): 1.07}  # drafting or not is about as fast


@pytest.mark.parametrize("name", [*MACHINES, "slow-cpu"])
@pytest.mark.parametrize("other", [*POOR, *MIDDLING])
def test_mixed_traffic_is_about_as_fast_as_the_best_choice_for_each_request(name: str, other: str) -> None:
    """To 1.05, but for drafters of middling quality that draft token by token, and where a draft costs 1.5 passes, so
    that the one trial a request can afford is a chain of three, which good requests fail as well."""
    rng = np.random.default_rng(7)
    qualities: Any = [GOOD, (POOR | MIDDLING)[other]] * 60  # NumPy takes any objects, which its types do not say
    requests = [Request(q, int(rng.integers(32, 129)), i) for i, q in enumerate(rng.permutation(qualities))]
    best = sum(in_hindsight(name, r) for r in requests)
    most = 1.08 if name == "slow-cpu" else SLOW.get((name, other), 1.05)
    assert total(machine(name).run(requests)).seconds <= most * best


requests_of_any_kind = st.lists(
    st.builds(
        Request,
        st.builds(Quality, st.floats(0, 1), st.sampled_from([0.005, 0.02, 0.1, 1.0])),
        st.integers(1, 200),
        st.integers(0, 10**6),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("name", MACHINES)
@given(requests=requests_of_any_kind, slots=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_no_request_loses_more_than_its_stake_and_trials(name: str, requests: list[Request], slots: int) -> None:
    """Whatever the requests are: against single tokens, a stake, the round that lost it, three more that there were
    signs for, and the share that probes may take; the last round may be cut short by the answer's end."""
    single_tokens = sum(r.tokens for r in requests)
    most = STAKE + 4 * TRIAL + 1
    spent = total(machine(name, slots).run(requests))
    assert spent.seconds <= single_tokens * (1 + SHARE) + most * len(requests)


@pytest.mark.parametrize("name", TREES)
def test_a_long_poor_request_probes_at_a_fixed_share(name: str) -> None:
    (spent,) = machine(name).run([Request(LIAR, 20_000)])
    assert spent.seconds <= 20_000 * (1 + SHARE) + STAKE + TRIAL
    assert spent.drafts > 40, "it should keep trying"


def test_a_pause_counts_the_single_tokens_of_all_requests() -> None:
    """Answers too short to save for a probe alone save for one together."""

    def drafts(slots: int) -> int:
        return total(machine("cpu", slots).run(Request(LIAR, 100, i) for i in range(40))).drafts

    assert drafts(1) > 40 + 10 and drafts(4) > 40 + 10
