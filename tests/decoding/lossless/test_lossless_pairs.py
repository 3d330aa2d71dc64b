"""Losslessness of every method with drafters whose candidates depend on the token before them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from scripted import completion, finish, generate
from scripted_models import MarkovTarget
from scripted_pairs import QUALITIES, PairsEngine, Quality, pairs
from truth import FALSE_ALARM, chi_square, distribution, joint

from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.tree import best_tree

PROMPT = (1, 2)
METHODS: dict[str, dict[str, Any]] = {
    "dflash": {"method": "dflash"},
    "ddtree-1": {"method": "ddtree", "tree_budget": 1},
    "ddtree-4": {"method": "ddtree", "tree_budget": 4},
    "ddtree-32": {"method": "ddtree", "tree_budget": 32},
    "dflash-sample": {"method": "dflash-sample"},
    "dflash-sample-2": {"method": "dflash-sample", "tree_budget": 2},
}
COUNTS = (2, None)  # candidates of a position; None: one less than the vocabulary


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_is_the_targets_greedy_output(method: str, quality: Quality, count: int | None) -> None:
    for seed in range(3):
        target = MarkovTarget(vocab_size=7, seed=seed)
        params = SamplingParams(max_tokens=40, **METHODS[method])
        expected: list[int] = []
        for _ in range(40):
            row = distribution(target.row([*PROMPT, *expected]), params, PROMPT, expected)
            expected.append(row.index(1))
        assert generate(PairsEngine(target, quality, count=count), PROMPT, params, 3) == [expected] * 3


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("method", [name for name in METHODS if "sample" not in name])
def test_the_candidates_do_not_touch_the_draws(method: str, temperature: float) -> None:
    """With one seed the output is that of `ar`, token for token."""
    target = MarkovTarget(vocab_size=8, seed=3)
    options: dict[str, Any] = {"temperature": temperature, "max_tokens": 30, "seed": 11, "top_p": 0.9}
    expected = generate(PairsEngine(target, "good"), PROMPT, SamplingParams(method="ar", **options), batch=3)
    for quality in QUALITIES:
        params = SamplingParams(**METHODS[method], **options)
        assert generate(PairsEngine(target, quality), PROMPT, params, batch=3) == expected


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("method", ["ddtree-4", "dflash-sample"])
def test_first_tokens_are_distributed_as_the_targets(method: str, quality: Quality, count: int | None) -> None:
    target = MarkovTarget(vocab_size=5, seed=1)
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.4}
    engine = PairsEngine(target, quality, count=count)
    scheduler = Scheduler(engine)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(1000):
        sampling = SamplingParams(seed=seed, max_tokens=3, **METHODS[method], **options)
        completions = [completion(engine, PROMPT, sampling, index=i) for i in range(3)]
        finish(scheduler, completions)
        counts.update(tuple(c.output) for c in completions)
    assert chi_square(counts, joint(target, SamplingParams(**options), PROMPT, 3)) > FALSE_ALARM


def test_conditionals_accept_more_than_marginals_do() -> None:
    """So that the tests above are of conditionals: the good drafter's tree at equal budget holds more of the target's
    probability than the tree of its marginals."""
    target = MarkovTarget(vocab_size=7, seed=2, spread=2.5)
    candidates = pairs(target, "good", PROMPT, 6, 6)
    plain = type(candidates)(candidates.unary, candidates.token_ids, 0 * candidates.left, candidates.right)
    assert _held(target, best_tree(candidates, 16)) > 1.05 * _held(target, best_tree(plain, 16))


def _held(target: MarkovTarget, tree: Any) -> float:
    """Expected number of draft tokens accepted, at temperature 1."""
    reached, paths = [1.0], [list(PROMPT)]
    for parent, token in zip(tree.parents[1:].tolist(), tree.token_ids.tolist(), strict=True):
        weights = np.exp(target.row(paths[parent]).astype(np.float64))
        reached.append(reached[parent] * weights[token] / weights.sum())
        paths.append([*paths[parent], token])
    return sum(reached[1:])
