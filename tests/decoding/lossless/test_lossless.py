"""Equal tokens: what every method says is what `ar` says with the same seed, on distributions that a test writes down.

A matrix of methods, drafters and engines over requests of every kind. At temperature 0 the tokens are those of a plain
statement of the sampler; above it noise belongs to a token, whatever was drafted, so they are those of `ar` too, whose
distribution `test_distributions.py` proves. Methods that draw their drafts are in this matrix at temperature 0 only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
from matrix import (
    CONSTRAINED,
    END,
    FILTERS,
    FORMS,
    METHODS,
    NO_TOKEN_ON,
    PENALTIES,
    PROMPT,
    QUALITIES,
    TEXTS,
    V,
    allowed,
    engine,
    text,
)
from profiles import make_budgets, make_profile
from scripted import ScriptedEngine, completion, finish, generate, verbs
from scripted_models import Array, Drafter, Good, MarkovTarget, Target
from truth import distribution

from ddtree_trt.runtime.decoding.budget.policy import AutoBudget
from ddtree_trt.runtime.decoding.loop import Round
from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, Verdict, VerifyRequest
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.tree import DraftTree, TokenTree

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy filtered": {"top_k": 3, "top_p": 0.8, "min_p": 0.2},
    "greedy penalties": PENALTIES,
    "greedy logprobs": {"logprobs": 2},
    "greedy constrained": {"min_tokens": 2},
    "drawn": {"temperature": 1.0},
    "filtered": {"temperature": 0.7, **FILTERS, "min_tokens": 1},
    "penalties": {"temperature": 1.0, **PENALTIES},
    "stopped": {"temperature": 1.0, "stop_token_ids": (5,)},
    "constrained": {"temperature": 1.0, "logprobs": 1},
    "constrained filtered": {"temperature": 0.9, "min_tokens": 4, **FILTERS},
    "constrained penalties": {"temperature": 1.0, **PENALTIES},
}


class InPlaceEngine(ScriptedEngine):
    """Rows are right only where each one's ancestors are the rows right before it; of the others one in `wrong_every`
    is wrong, with 0 none. They may not be committed; lookahead tokens must begin the next tree."""

    def __init__(self, target: Target, drafter: Drafter, *, wrong_every: int = 3, **options: Any) -> None:
        super().__init__(target, drafter, **options)
        self.lookahead_tokens = 0
        self._wrong_every = wrong_every
        self._ahead: dict[int, list[int]] = {}  # by slot: tokens the drafter has seen and the cache does not hold
        self._last: dict[int, tuple[TokenTree, int]] = {}  # by slot: the last tree, and how many nodes were committed

    def lookahead(self, slot: int, nodes: Array) -> None:
        tree, committed = self._last[slot]
        assert nodes[0] >= committed and (np.diff(nodes) > 0).all()
        self._ahead[slot] = tree.token_ids[nodes].tolist()
        self.lookahead_tokens += len(nodes)

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        for request in requests:
            ahead = self._ahead.pop(request.slot, [])
            assert request.tree.token_ids[: len(ahead)].tolist() == ahead
            assert request.tree.depths[: len(ahead) + 1].tolist() == list(range(len(ahead) + 1))
        verdicts = super().verify(requests)
        for request, verdict in zip(requests, verdicts, strict=True):
            assert isinstance(verdict.logits, np.ndarray)
            wrong = np.flatnonzero(request.tree.depths != np.arange(len(request.tree)))
            wrong = wrong[:: self._wrong_every] if self._wrong_every else wrong[:0]
            verdict.logits[wrong] = np.roll(verdict.logits[wrong], 1, axis=1)
            verdict.choices[:] = verdict.logits.argmax(1)
        return verdicts

    def commit(self, slot: int, path: Array, *, taps: bool) -> None:
        assert path.tolist() == list(range(len(path)))
        tree = self._slots[slot].tree
        assert tree is not None
        super().commit(slot, path, taps=taps)
        self._last[slot] = tree, len(path)

    def _draft(self, request: DraftRequest) -> Draft:
        state, ahead = self._slots[request.slot], self._ahead.get(request.slot, [])
        state.tokens += ahead
        state.known += len(ahead)
        draft = super()._draft(request)
        state.known -= len(ahead)
        del state.tokens[len(state.tokens) - len(ahead) :]
        return draft


def outputs(engine_: ScriptedEngine, params: SamplingParams, batch: int, sampler: type[Sampler]) -> list[list[int]]:
    eos = [] if sampler is Sampler else [END]
    completions = [completion(engine_, PROMPT, params, eos=eos, index=i, sampler=sampler) for i in range(batch)]
    finish(Scheduler(engine_), completions)
    return [c.output for c in completions]


def greedy(target: MarkovTarget, params: SamplingParams, tokens: int, within: bool) -> list[int]:
    """The target's best token at every step, by the sampler's plain statement."""
    output: list[int] = []
    while len(output) < tokens and output[-1:] != [END if within else None]:
        row = target.row([*PROMPT, *output]).tolist()
        if within:
            keep = allowed(text(output))
            if not keep - {END}:
                break
            row = [x if token in keep else -math.inf for token, x in enumerate(row)]
        output.append(distribution(row, params, PROMPT, output, [END] if within else ()).index(1))
    return output


@pytest.mark.parametrize("in_place", [False, True], ids=["any row", "rows in place"])
@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_ar(method: str, form: str, quality: str, in_place: bool) -> None:
    """Lengths, batches and seeds differ from request to request, and from cell to cell of the matrix."""
    numbers = count(list(METHODS).index(method) + 2 * FORMS.index(form) + 5 * QUALITIES.index(quality))
    for name, request in REQUESTS.items():
        number = next(numbers)
        if "temperature" in request and method.startswith(("dflash-sample", "draft-model")):
            continue
        tokens, batch, within = (31, 5, 60, 2, 1)[number % 5], 1 + 2 * (number % 2), "constrained" in name
        sampler = CONSTRAINED if within else Sampler
        target = MarkovTarget(vocab_size=V, seed=number)
        common = {"max_tokens": tokens, "seed": number, **request}
        common["min_tokens"] = min(tokens, common.get("min_tokens", 0))
        params = SamplingParams(**METHODS[method], **common)
        made = engine(method, target, form, quality, InPlaceEngine if in_place else ScriptedEngine)
        found = outputs(made, params, batch, sampler)
        if params.temperature == 0:
            assert found == [greedy(target, params, tokens, within)] * batch, name
        else:
            plain = engine("ar", target, "marginals", "useless")
            assert found == outputs(plain, SamplingParams(method="ar", **common), batch, sampler), name


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 0.9, **FILTERS}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_an_output_that_must_end_ends_before_min_tokens(method: str, options: dict[str, Any]) -> None:
    target = MarkovTarget(vocab_size=V, seed=1)
    made = engine(method, target)
    params = SamplingParams(seed=3, min_tokens=9, **METHODS[method], **options)
    for output in outputs(made, params, 3, NO_TOKEN_ON):
        assert output[0] in (0, 1) and output[1:] == [2, 3, END]


def test_nodes_that_are_not_allowed_are_not_verified() -> None:
    target, rounds = MarkovTarget(vocab_size=V, seed=1), list[Round]()
    made = engine("ddtree-4", target)
    params = SamplingParams(temperature=1, seed=3, tree_budget=6, min_tokens=6)
    one = completion(made, PROMPT, params, eos=[END], sampler=CONSTRAINED)
    one.on_round = rounds.append
    finish(Scheduler(made), [one])
    position = 1
    for done in rounds:
        paths = [one.output[:position]]
        for parent, token in zip(done.tree.parents[1:].tolist(), done.tree.token_ids.tolist(), strict=True):
            paths.append([*paths[parent], token])
            assert any(t.startswith(text(paths[-1])) for t in TEXTS)
        position += len(done.path)
    assert sum(len(done.tree) for done in rounds) > 3


# Rows in place


def test_a_lookahead_costs_no_rounds() -> None:
    """Where the rows are right after all, tokens come a round later, and at the end that may take one round more."""
    target, rounds = MarkovTarget(vocab_size=V, seed=1), []
    params = SamplingParams(method="ddtree", tree_budget=8, max_tokens=60, seed=2, temperature=1.0)
    for made in (ScriptedEngine(target, Good(target)), InPlaceEngine(target, Good(target), wrong_every=0)):
        generate(made, PROMPT, params)
        rounds.append(verbs(made)["verify"])
    assert isinstance(made, InPlaceEngine) and made.lookahead_tokens > 5
    assert rounds[0] <= rounds[1] <= rounds[0] + 1


def test_an_automatic_budget_is_shown_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one in which a lookahead token was not confirmed: its draft was for nothing, and is no evidence."""
    shown: list[tuple[list[int], bool]] = []

    def observe(budget: object, decision: object, tree: DraftTree, path: np.ndarray, *, ends: bool = False) -> None:
        shown.append((path.tolist(), ends))

    monkeypatch.setattr(AutoBudget, "observe", observe)
    target = MarkovTarget(vocab_size=V, seed=1)
    made = InPlaceEngine(target, Good(target))
    of = completion(made, PROMPT, SamplingParams(method="ddtree", max_tokens=60, seed=2, temperature=1.0))
    of.budget = AutoBudget(make_budgets(make_profile(0.01, 0.001), 8, 3))
    finish(Scheduler(made), [of])
    assert len(shown) == verbs(made)["verify"]
    assert all(path[0] == 0 for path, _ in shown)
    unconfirmed = [path for path, ends in shown[:-1] if ends]
    assert unconfirmed and all(path == [0] for path in unconfirmed)


def test_chains_leave_nothing_to_look_ahead_at() -> None:
    target = MarkovTarget(vocab_size=V, seed=1)
    for method in ("ar", "dflash", "dflash-sample"):
        made = InPlaceEngine(target, Good(target))
        generate(made, PROMPT, SamplingParams(method=method, max_tokens=40, seed=3, temperature=1.0))
        assert made.lookahead_tokens == 0
