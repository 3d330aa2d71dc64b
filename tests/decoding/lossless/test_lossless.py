"""Equal tokens: what every method says is what `ar` says with the same seed, on distributions that a test writes down.

A matrix of methods, drafters and engines over requests of every kind. At temperature 0 the tokens are those of a plain
statement of the sampler; above it noise belongs to a token, whatever was drafted, so they are those of `ar` too, whose
distribution `test_distributions.py` proves. Methods that draw their drafts are in this matrix at temperature 0 only.
"""

import math
from itertools import count
from typing import Any

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
from scripted import ScriptedEngine, completion, finish
from scripted_models import MarkovTarget
from truth import distribution

from ddtree_trt.runtime.decoding.loop import Round
from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.scheduler import Scheduler

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


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_ar(method: str, form: str, quality: str) -> None:
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
        made = engine(method, target, form, quality)
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
