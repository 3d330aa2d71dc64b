"""Losslessness under a constraint: every method gives the target's own distribution, restricted token by token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from in_place import InPlaceEngine
from languages import Compiler, constrained, letters, texts_of
from scripted import ScriptedEngine, completion, finish
from scripted_models import Adversarial, Drafter, Good, MarkovTarget, Useless
from truth import FALSE_ALARM, chi_square, distribution

from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.structured.record import StructuredOutput

V, END, PROMPT = 7, 6, (1, 2)
EXPRESSION = "(a|b)(c(d|e)?|f{1,2}c)(a|e){0,3}"
TEXTS = texts_of(EXPRESSION, "abcdef", 7)
COMPILER = Compiler(letters(V), END)
SAMPLER = constrained(StructuredOutput(regex=EXPRESSION), COMPILER)
METHODS: dict[str, dict[str, Any]] = {
    "ar": {"method": "ar"},
    "dflash": {"method": "dflash"},
    "ddtree-4": {"method": "ddtree", "tree_budget": 4},
    "ddtree-32": {"method": "ddtree", "tree_budget": 32},
    "dflash-sample": {"method": "dflash-sample"},
    "draft-model": {"method": "draft-model"},
}
DRAFTERS: dict[str, Callable[[MarkovTarget], Drafter]] = {
    "good": Good,
    "adversarial": Adversarial,
    "useless": lambda target: Useless(target.vocab_size),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "filtered": {"temperature": 0.9, "top_k": 3, "top_p": 0.9},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "logit_bias": {0: 1.5}},
    "shortest": {"temperature": 1.0, "min_tokens": 4},
    "logprobs": {"temperature": 1.0, "logprobs": 2},
}


def engine(method: str, target: MarkovTarget, drafter: Drafter) -> ScriptedEngine:
    return ScriptedEngine(target, drafter, kind="autoregressive" if method.startswith("draft-model") else "dflash")


def outputs(
    engine: ScriptedEngine, params: SamplingParams, batch: int = 1, sampler: type[Sampler] = SAMPLER
) -> list[list[int]]:
    completions = [completion(engine, PROMPT, params, eos=[END], index=i, sampler=sampler) for i in range(batch)]
    finish(Scheduler(engine), completions)
    assert all(c.finish_reason == "stop" for c in completions)
    return [c.output for c in completions]


def text(tokens: tuple[int, ...]) -> str:
    return "".join("abcdef"[t] for t in tokens if t != END)


@cache
def allowed(before: str) -> frozenset[int]:
    """The tokens behind a beginning, by the list of all texts."""
    following = {"abcdef".index(t[len(before)]) for t in TEXTS if t.startswith(before) and len(t) > len(before)}
    return frozenset(following | ({END} if before in TEXTS else set()))


def joint(target: MarkovTarget, params: SamplingParams, output: tuple[int, ...] = ()) -> dict[tuple[int, ...], float]:
    """The exact probability of every output: at each step the target's distribution over what is allowed."""
    tokens = allowed(text(output))
    if output[-1:] == (END,) or not tokens - {END}:
        return {output: 1.0}
    row = [x if token in tokens else -math.inf for token, x in enumerate(target.row([*PROMPT, *output]))]
    found: dict[tuple[int, ...], float] = {}
    for token, p in enumerate(distribution(row, params, PROMPT, output, [END])):
        if p > 0:
            found |= {tokens: p * q for tokens, q in joint(target, params, (*output, token)).items()}
    return found


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *[("ddtree-4", options) for options in ("drawn", "filtered", "shortest")],
        *[(method, "drawn") for method in ("ar", "dflash-sample", "draft-model")],
        ("draft-model", "penalties"),
    ],
)
def test_draws_are_of_the_restricted_distribution(method: str, options: str) -> None:
    draws(method, options, 150)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["drawn", "filtered", "penalties", "shortest"])
@pytest.mark.parametrize("method", METHODS)
def test_many_draws_are_of_the_restricted_distribution(method: str, options: str) -> None:
    draws(method, options, 10_000)


def draws(method: str, options: str, count: int) -> None:
    target = MarkovTarget(vocab_size=V, seed=1)
    made = engine(method, target, Good(target))
    expected = joint(target, SamplingParams(**OPTIONS[options]))
    counts = Counter(
        tuple(output)
        for seed in range(count)
        for output in outputs(made, SamplingParams(seed=seed, **METHODS[method], **OPTIONS[options]), 2)
    )
    assert chi_square(counts, expected) > FALSE_ALARM


def test_the_test_of_draws_sees_a_wrong_distribution() -> None:
    target = MarkovTarget(vocab_size=V, seed=1)
    params = SamplingParams(temperature=1.0)
    expected = joint(MarkovTarget(vocab_size=V, seed=2), params)
    made = engine("ar", target, Good(target))
    counts = Counter(
        tuple(output)
        for seed in range(150)
        for output in outputs(made, SamplingParams(seed=seed, temperature=1.0, method="ar"), 2)
    )
    assert chi_square(counts, expected) < FALSE_ALARM


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_method_gives_the_tokens_of_ar(name: str, options: str, in_place: bool) -> None:
    methods = [m for m in METHODS if not m.startswith(("ar", "draft")) and not (in_place and "sample" in m)]
    if options != "greedy":
        methods = [m for m in methods if m != "dflash-sample"]
    for seed in range(2):
        target = MarkovTarget(vocab_size=V, seed=seed)
        drafter = DRAFTERS[name](target)
        common = {"seed": seed, **OPTIONS[options]}
        expected = outputs(engine("ar", target, drafter), SamplingParams(method="ar", **common), 3)
        assert all(text(tuple(tokens)) in TEXTS for tokens in expected)
        for method in methods:
            made = InPlaceEngine(target, drafter) if in_place else engine(method, target, drafter)
            assert outputs(made, SamplingParams(**METHODS[method], **common), 3) == expected


# Behind "acd" the expression goes on, but no token of the vocabulary does: only the end is allowed.
NO_TOKEN_ON = constrained(StructuredOutput(regex="(a|b)cd(gg)?"), COMPILER)
BEYOND: dict[str, dict[str, Any]] = {
    "greedy": {"min_tokens": 9},
    "drawn": {"temperature": 1.0, "min_tokens": 9},
    "filtered": {"temperature": 0.9, "top_k": 3, "top_p": 0.9, "min_tokens": 9},
}


@pytest.mark.parametrize("options", BEYOND)
@pytest.mark.parametrize("method", METHODS)
def test_an_output_that_must_end_ends_before_min_tokens(method: str, options: str) -> None:
    """The constraint wins: what is drawn is drawn from what it allows."""
    target = MarkovTarget(vocab_size=V, seed=1)
    made = engine(method, target, Good(target))
    counts: Counter[int] = Counter()
    for seed in range(60):
        params = SamplingParams(seed=seed, **METHODS[method], **BEYOND[options])
        for output in outputs(made, params, 2, NO_TOKEN_ON):
            assert output[1:] == [2, 3, END] and output[0] in (0, 1)
            counts[output[0]] += 1
    row = [x if token in (0, 1) else -math.inf for token, x in enumerate(target.row(PROMPT))]
    first = distribution(row, SamplingParams(**BEYOND[options]), PROMPT, ())
    assert chi_square(counts, {token: p for token, p in enumerate(first) if p > 0}) > FALSE_ALARM


def test_greedy_is_the_best_allowed_token() -> None:
    target = MarkovTarget(vocab_size=V, seed=3)
    (found,) = outputs(engine("ddtree-4", target, Good(target)), SamplingParams(method="ddtree", tree_budget=4))
    (expected,) = joint(target, SamplingParams())
    assert tuple(found) == expected


def test_nodes_that_are_not_allowed_are_not_verified() -> None:
    """The trees are those of the texts, and tokens per round are no fewer than with all nodes of the plain trees."""
    target, trees = MarkovTarget(vocab_size=V, seed=1), []
    made = engine("ddtree-4", target, Good(target))
    (one,) = (
        completion(made, PROMPT, SamplingParams(temperature=1, seed=s, tree_budget=4), eos=[END], sampler=SAMPLER)
        for s in [3]
    )
    one.on_round = lambda r: trees.append((len(one.output), r))
    finish(Scheduler(made), [one])
    position = 1
    for _, done in trees:
        before = one.output[:position]
        for node in range(1, 1 + len(done.tree)):
            path, at = [], node
            while at > 0:
                path.append(int(done.tree.token_ids[at - 1]))
                at = int(done.tree.parents[at])
            reached = text((*before, *reversed(path)))
            assert any(t.startswith(reached) for t in TEXTS)
        position += len(done.path)
    assert trees and any(len(done.tree) for _, done in trees)
    assert np.all([len(done.tree) <= 4 for _, done in trees])
