"""What fails in a round ends the sequences it belongs to and no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scheduling import ALONE, MIXED, TARGET, failing, make, said
from scripted import ScriptedEngine, completion, finish, generate
from scripted_models import Good, MarkovTarget, Useless

from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.tree import TokenTree


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("verb", ["draft", "verify", "commit"])
def test_a_failed_round_ends_those_in_it_and_no_others(verb: str, together: bool) -> None:
    """Slots that take turns have rounds of their own."""
    engine = make(2)
    engine.batches = together
    scheduler = Scheduler(engine)
    completions = [completion(engine, *MIXED[i]) for i in (0, 1, 2, 5)]
    for c in completions:
        scheduler.add(c)
    while len(scheduler.running) < 2:
        scheduler.step()
    failing(engine, verb)
    scheduler.step()
    ended = 2 if together else 1
    assert [c.finish_reason for c in completions] == ["error"] * ended + [None] * (4 - ended)
    assert [str(c.error) for c in completions[:ended]] == [f"{verb} failed"] * ended
    assert scheduler.free_slots == ended
    while scheduler.busy:
        scheduler.step()
    assert [said(c) for c in completions[2:]] == [ALONE[2], ALONE[5]]
    assert completions[2].metrics.cached_tokens == 0, "a slot in doubt starts empty"


def test_a_failed_prefill_ends_its_sequence_only() -> None:
    engine = make()
    scheduler = Scheduler(engine)
    completions = [completion(engine, *MIXED[i]) for i in (0, 2, 5)]
    scheduler.add(completions[0])
    scheduler.step()
    failing(engine, "prefill")
    for c in completions[1:]:
        scheduler.add(c)
    while scheduler.busy:
        scheduler.step()
    assert (completions[1].finish_reason, str(completions[1].error)) == ("error", "prefill failed")
    assert [said(completions[0]), said(completions[2])] == [ALONE[0], ALONE[5]]


class Breaking(MarkovTarget):
    """Says NaN behind one token."""

    def __init__(self, bad: int) -> None:
        super().__init__(vocab_size=7, seed=1)
        self.bad = bad

    def logits(self, committed: Sequence[int], tree: TokenTree) -> np.ndarray:
        logits = super().logits(committed, tree)
        logits[tree.token_ids == self.bad] = np.nan
        return logits


def test_logits_that_are_not_finite_end_their_sequence_only() -> None:
    asked = ([1, 2], SamplingParams(max_tokens=6))
    (expected,) = generate(make(), *asked)
    bad = next(t for t in range(7) if t not in [1, 2, *expected])
    target = Breaking(bad)
    engine = ScriptedEngine(target, Useless(7))  # its trees do not come upon the bad token's row by themselves
    sound = completion(engine, *asked)
    biased = completion(engine, [1, 2], SamplingParams(max_tokens=20, logit_bias={bad: 100.0}))
    prefilled = completion(engine, [1, bad], SamplingParams(max_tokens=20))
    scheduler = Scheduler(engine)
    for c in (sound, biased, prefilled):
        scheduler.add(c)
    while scheduler.busy:
        scheduler.step()
    assert sound.output == expected
    for c in (biased, prefilled):
        assert isinstance(c.error, EngineError)
        assert "not finite" in str(c.error)


def test_a_drafter_that_says_nan_ends_its_sequence_only() -> None:
    class Broken(Good):
        def block(self, context: Sequence[int], length: int) -> np.ndarray:
            rows = super().block(context, length)
            return rows * np.nan if context[0] == 5 else rows

    engine = ScriptedEngine(TARGET, Broken(TARGET))
    asked: list[tuple[int, dict[str, Any]]] = [
        (5, {}),
        (5, {"method": "dflash-sample", "temperature": 1.0, "seed": 1}),
        (4, {}),
        (5, {"method": "dflash"}),
    ]
    completions = [completion(engine, [start, 1], SamplingParams(max_tokens=9, **options)) for start, options in asked]
    scheduler = Scheduler(engine)
    for c in completions:
        scheduler.add(c)
    while scheduler.busy:
        scheduler.step()
    assert [type(c.error) for c in completions] == [EngineError, EngineError, type(None), EngineError]


def test_a_watcher_that_fails_ends_its_sequence_only() -> None:
    engine = make()
    completions = [completion(engine, *MIXED[i]) for i in (0, 5)]

    def watch(round_: Any) -> None:
        raise RuntimeError("cannot draw this")

    completions[0].on_round = watch
    scheduler = Scheduler(engine)
    for c in completions:
        scheduler.add(c)
    while scheduler.busy:
        scheduler.step()
    assert (completions[0].finish_reason, str(completions[0].error)) == ("error", "cannot draw this")
    assert said(completions[1]) == ALONE[5]


def test_an_interrupted_round_is_not_taken_up_again() -> None:
    engine = make(2)
    scheduler = Scheduler(engine)
    c = completion(engine, *MIXED[5])
    scheduler.add(c)
    scheduler.step()

    def interrupt(verb: str, slots: tuple[int, ...]) -> None:
        if verb == "commit":
            raise KeyboardInterrupt

    engine.fail = interrupt
    with pytest.raises(KeyboardInterrupt):
        scheduler.step()
    engine.fail = lambda verb, slots: None
    assert (c.finish_reason, c.error, scheduler.free_slots) == ("abort", None, 2)
    again = completion(engine, *MIXED[5])
    finish(scheduler, [again])
    assert said(again) == ALONE[5]
