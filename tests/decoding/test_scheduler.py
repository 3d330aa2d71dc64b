"""Continuous batching: what a sequence says never depends on who else is there, nor on what its slot held before."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import ALONE, CHUNK, MIXED, TARGET, failing, make, prompt, said
from scipy.special import log_softmax
from scripted import ScriptedEngine, completion, finish, generate
from scripted_models import Good, Useless

from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.stats import ROUND_STAGES


def test_sixteen_together_are_as_one_by_one() -> None:
    engine = make()
    completions = [completion(engine, *request) for request in MIXED]
    scheduler = Scheduler(engine)
    finish(scheduler, completions)
    assert [said(c) for c in completions] == ALONE
    assert scheduler.free_slots == 4
    assert not scheduler.busy


@given(
    arrivals=st.lists(st.integers(0, 12), min_size=len(MIXED), max_size=len(MIXED)),
    leaves=st.lists(st.one_of(st.none(), st.integers(0, 25)), min_size=len(MIXED), max_size=len(MIXED)),
    slots=st.integers(1, 6),
    order=st.permutations(range(len(MIXED))),
)
@settings(max_examples=60)
def test_no_schedule_and_no_cancellation_changes_what_another_says(
    arrivals: list[int], leaves: list[int | None], slots: int, order: list[int]
) -> None:
    engine = make(slots)
    scheduler = Scheduler(engine)
    completions = [completion(engine, *request) for request in MIXED]
    for step in range(10_000):
        for i in order:
            if arrivals[i] == step:
                scheduler.add(completions[i])
            if leaves[i] == step:
                scheduler.cancel(completions[i])
        if step > 26 and not scheduler.busy:
            break
        scheduler.step()
        holders = [c.slot for c in completions if c in scheduler.running or c in scheduler.prefilling]
        assert len(set(holders)) == len(holders) == slots - scheduler.free_slots
    for i, c in enumerate(completions):
        assert c.error is None
        left = leaves[i]
        if c.finish_reason == "abort":
            assert left is not None
            assert c.output == ALONE[i][0][: len(c.output)]
        elif left is None or arrivals[i] <= left:
            assert said(c) == ALONE[i]
    assert scheduler.free_slots == slots


def test_a_cancelled_slot_is_free_at_once() -> None:
    engine = make(1)
    scheduler = Scheduler(engine)
    first, second, third = (completion(engine, prompt(i, 4), SamplingParams(max_tokens=50)) for i in range(3))
    for c in (first, second, third):
        scheduler.add(c)
    scheduler.step()
    assert (first.slot, second.slot, scheduler.free_slots) == (0, None, 0)
    scheduler.cancel(second)
    scheduler.cancel(first)
    assert (first.finish_reason, second.finish_reason, scheduler.free_slots) == ("abort", "abort", 1)
    scheduler.step()
    assert third.slot == 0
    assert second.output == []


def test_seeds_repeat_and_unseeded_requests_are_independent() -> None:
    params: dict[str, Any] = {"temperature": 1.0, "max_tokens": 30}
    seeded = [
        generate(make(), [1, 2], SamplingParams(seed=7, method=m, **params), batch=3)
        for m in ("ar", "dflash", "ddtree")
    ]
    assert seeded[0] == seeded[1] == seeded[2]
    assert len({tuple(tokens) for tokens in seeded[0]}) == 3  # n completions of one seed differ
    unseeded = [generate(make(), [1, 2], SamplingParams(**params))[0] for _ in range(10)]
    assert len({tuple(tokens) for tokens in unseeded}) == 10


# Log-probabilities


@pytest.mark.parametrize("method", ["ar", "dflash", "ddtree", "dflash-sample"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_targets_own(method: str, temperature: float) -> None:
    """Before penalties and temperature, whatever they do to the choice; over chunks of the prompt."""
    asked = prompt(3, 2 * CHUNK + 3)
    params = SamplingParams(
        method=method,
        temperature=temperature,
        seed=1,
        max_tokens=15,
        logprobs=3,
        prompt_logprobs=2,
        frequency_penalty=1.5,
    )
    c = completion(make(), asked, params)
    finish(Scheduler(make()), [c])
    whole = [*asked, *c.output]
    assert len(c.prompt_logprobs) == len(asked)
    assert len(c.logprobs) == len(c.output) == 15
    assert c.prompt_logprobs[0] is None
    for i, entry in enumerate([*c.prompt_logprobs, *c.logprobs][1:], 1):
        assert entry is not None
        row = log_softmax(TARGET.row(whole[:i]).astype(np.float64))
        assert entry.token_id == whole[i]
        assert entry.logprob == pytest.approx(row[whole[i]], abs=1e-6)
        assert entry.rank == 1 + int((row > row[whole[i]]).sum())
        best = np.argsort(-row)[: 2 if i < len(asked) else 3]
        assert [t for t, _ in entry.top] == best.tolist()
        assert [p for _, p in entry.top] == pytest.approx(row[best].tolist(), abs=1e-6)
    output = c.output_so_far()
    assert output.cumulative_logprob == pytest.approx(sum(e.logprob for e in c.logprobs))


# Figures


def test_stage_times_count_for_those_who_took_part() -> None:
    engine = make()
    short, long = (
        completion(engine, [1], SamplingParams(max_tokens=1)),
        completion(engine, [2], SamplingParams(max_tokens=9)),
    )
    finish(Scheduler(engine), [short, long])
    assert short.metrics.stage_s["verify"] == 0 < short.metrics.stage_s["prefill"]
    assert all(long.metrics.stage_s[stage] > 0 for stage in ("prefill", *ROUND_STAGES))


def test_only_profiling_waits_for_the_engine() -> None:
    """At the end of every stage the engine has a part in, and of no other."""
    verbs: dict[bool, list[str]] = {}
    for profile in (False, True):
        engine = make()
        c = completion(engine, [1, 2, 3], SamplingParams(max_tokens=12, tree_budget=6))
        finish(Scheduler(engine, profile=profile), [c])
        verbs[profile] = [call.verb for call in engine.calls]
        assert all(c.metrics.stage_s[stage] > 0 for stage in ("prefill", *ROUND_STAGES))
    assert "synchronize" not in verbs[False]
    assert verbs[True] == [verb for plain in verbs[False] for verb in (plain, "synchronize")]


def test_an_engine_that_failed_is_not_waited_for() -> None:
    engine = make()
    failing(engine, "verify")
    c = completion(engine, [1], SamplingParams(max_tokens=9))
    with pytest.raises(EngineError, match="verify failed"):
        finish(Scheduler(engine, profile=True), [c])
    assert engine.calls[-1].verb == "verify"


def test_rounds_and_tokens_add_up() -> None:
    for drafter in (Good(TARGET), Useless(TARGET.vocab_size)):
        engine = ScriptedEngine(TARGET, drafter)
        c = completion(engine, [1, 2], SamplingParams(max_tokens=30, tree_budget=10))
        finish(Scheduler(engine), [c])
        m = c.metrics
        assert 1 + sum(m.acceptance_lengths) == m.output_tokens == 30
        assert m.rounds == len(m.budgets) == Counter(call.verb for call in engine.calls)["verify"]
        assert m.accepted_tokens == 30 - 1 - m.rounds
        assert m.budgets == [10] * m.rounds
        assert sum(m.acceptance_histogram.values()) == m.rounds
        assert m.acceptance_by_depth == sorted(m.acceptance_by_depth, reverse=True)
        assert m.time_to_first_token_s is not None and m.time_to_first_token_s > 0
