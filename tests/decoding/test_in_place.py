"""Rounds of an engine only some of whose rows may choose tokens that are emitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from in_place import InPlaceEngine
from profiles import make_budgets, make_profile
from scripted import ScriptedEngine, completion, finish, generate, verbs
from scripted_models import Adversarial, Drafter, Good, MarkovTarget, Useless

from ddtree_trt.runtime.decoding.budget.policy import AutoBudget
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.tree import DraftTree

PROMPT = (1, 2)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logprobs": {"logprobs": 2},
    "drawn": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "min_tokens": 1},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "logit_bias": {0: 1.5}},
    "stopped": {"temperature": 1.0, "stop_token_ids": (5,)},
}
DRAFTERS: dict[str, Callable[[MarkovTarget], Drafter]] = {
    "good": Good,
    "adversarial": Adversarial,
    "useless": lambda target: Useless(target.vocab_size),
}


def drafter(name: str, target: MarkovTarget) -> Drafter:
    return DRAFTERS[name](target)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("budget", [1, 5, 16, 32])
def test_no_token_comes_from_a_row_that_is_not_in_place(budget: int, name: str, options: str, batch: int) -> None:
    for seed in range(3):
        target = MarkovTarget(vocab_size=7, seed=seed)
        for tokens in (1, 2, 5, 31, 62):
            common = {"max_tokens": tokens, "seed": seed, **OPTIONS[options]}
            engine = InPlaceEngine(target, drafter(name, target))
            params = SamplingParams(method="ddtree", tree_budget=budget, **common)
            expected = generate(
                ScriptedEngine(target, drafter(name, target)), PROMPT, SamplingParams(method="ar", **common), batch
            )
            assert generate(engine, PROMPT, params, batch) == expected


def test_a_lookahead_costs_no_rounds() -> None:
    """Where the rows are right after all, tokens come a round later, and at the end that may take one round more."""
    target, rounds = MarkovTarget(vocab_size=7, seed=1), []
    params = SamplingParams(method="ddtree", tree_budget=8, max_tokens=60, seed=2, temperature=1.0)
    for engine in (ScriptedEngine(target, Good(target)), InPlaceEngine(target, Good(target), wrong_every=0)):
        generate(engine, PROMPT, params)
        rounds.append(verbs(engine)["verify"])
    assert isinstance(engine, InPlaceEngine) and engine.lookahead_tokens > 5
    assert rounds[0] <= rounds[1] <= rounds[0] + 1


def test_an_automatic_budget_is_shown_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one in which a lookahead token was not confirmed: its draft was for nothing, and is no evidence."""
    shown: list[tuple[list[int], bool]] = []

    def observe(budget: object, decision: object, tree: DraftTree, path: np.ndarray, *, ends: bool = False) -> None:
        shown.append((path.tolist(), ends))

    monkeypatch.setattr(AutoBudget, "observe", observe)
    target = MarkovTarget(vocab_size=7, seed=1)
    engine = InPlaceEngine(target, Good(target))
    params = SamplingParams(method="ddtree", max_tokens=60, seed=2, temperature=1.0)
    of = completion(engine, PROMPT, params)
    of.budget = AutoBudget(make_budgets(make_profile(0.01, 0.001), 8, 3))
    finish(Scheduler(engine), [of])
    assert len(shown) == verbs(engine)["verify"]
    assert all(path[0] == 0 for path, _ in shown)
    unconfirmed = [path for path, ends in shown[:-1] if ends]
    assert unconfirmed and all(path == [0] for path in unconfirmed)


def test_chains_leave_nothing_to_foresee() -> None:
    target = MarkovTarget(vocab_size=7, seed=1)
    for method in ("ar", "dflash", "dflash-sample"):
        engine = InPlaceEngine(target, Good(target))
        generate(engine, PROMPT, SamplingParams(method=method, max_tokens=40, seed=3, temperature=1.0))
        assert engine.lookahead_tokens == 0
