"""Losslessness of every method, on distributions that are known exactly.

At temperature 0 the output must be the target's greedy output. Above it, its distribution must be the target's: proven
by walking through every random decision the loop can take (no draws, no false alarm), and by draws from the real
generator. `pytest -m slow tests/decoding/lossless/test_lossless.py` runs the full table of draws: half an hour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from scripted import ScriptedEngine, completion, finish, generate
from scripted_models import Adversarial, Conditional, Drafter, Good, MarkovTarget, Useless
from truth import FALSE_ALARM, chi_square, distribution, drift, joint

from ddtree_trt import _native
from ddtree_trt.runtime.decoding.noise import Noise
from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.scheduler import Scheduler

PROMPT = (1, 2)
METHODS: dict[str, dict[str, Any]] = {
    "ar": {"method": "ar"},
    "dflash": {"method": "dflash"},
    "ddtree-1": {"method": "ddtree", "tree_budget": 1},
    "ddtree-4": {"method": "ddtree", "tree_budget": 4},
    "ddtree-32": {"method": "ddtree", "tree_budget": 32},
    "dflash-sample": {"method": "dflash-sample"},
    "dflash-sample-2": {"method": "dflash-sample", "tree_budget": 2},
    "draft-model": {"method": "draft-model"},
    "draft-model-1": {"method": "draft-model", "tree_budget": 1},
}
FIXED_SETS = [name for name in METHODS if not name.startswith(("ar", "dflash-sample", "draft-model"))]
FILTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "top-k-p": {"top_k": 4, "top_p": 0.9, "min_p": 0.05},
}
BIASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.5,
        "logit_bias": {0: 1.5, 3: -1.0},
    },
}
DRAFTERS = ("good", "useless", "adversarial", "linked good", "bilinear useless", "bilinear adversarial")


def drafter(name: str, target: MarkovTarget) -> Drafter:
    form, _, quality = name.rpartition(" ")
    if form:
        worst = 1 / (target.pairs + 1e-3) ** 2
        worst[np.arange(target.vocab_size), target.pairs.argmax(1)] = 0
        tables = {"good": target.pairs, "useless": np.ones_like(worst), "adversarial": worst}
        pairs = tables[quality] / tables[quality].sum(1, keepdims=True)
        return Conditional(pairs, "linked" if form == "linked" else "bilinear")
    if name == "useless":
        return Useless(target.vocab_size)
    return Good(target) if name == "good" else Adversarial(target)


def engine(method: str, name: str, target: MarkovTarget, **options: Any) -> ScriptedEngine:
    kind = "autoregressive" if method.startswith("draft-model") else "dflash"
    return ScriptedEngine(target, drafter(name, target), kind=kind, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_is_the_targets_greedy_output(method: str, name: str, bias: str, batch: int) -> None:
    for seed in range(3):
        target = MarkovTarget(vocab_size=7, seed=seed)
        params = SamplingParams(max_tokens=40, **METHODS[method], **BIASES[bias])
        outputs = generate(engine(method, name, target), PROMPT, params, batch)
        expected: list[int] = []
        for _ in range(40):
            row = distribution(target.row([*PROMPT, *expected]), params, PROMPT, expected)
            expected.append(row.index(1))
        assert outputs == [expected] * batch


@pytest.mark.parametrize("method", METHODS)
def test_filters_change_nothing_at_temperature_0(method: str) -> None:
    target = MarkovTarget(seed=5)
    params = METHODS[method]
    plain = generate(engine(method, "good", target), PROMPT, SamplingParams(max_tokens=20, **params))
    for options in FILTERS.values():
        filtered = SamplingParams(max_tokens=20, **params, **options)
        assert generate(engine(method, "good", target), PROMPT, filtered) == plain


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("filtered", FILTERS)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("method", FIXED_SETS)
def test_a_fixed_set_of_candidates_does_not_touch_the_draws(
    method: str, temperature: float, filtered: str, bias: str
) -> None:
    """Noise belongs to a token, whatever was drafted: with one seed the output is that of `ar`, token for token."""
    target = MarkovTarget(vocab_size=8, seed=3)
    options = {"temperature": temperature, "max_tokens": 30, "seed": 11, **FILTERS[filtered], **BIASES[bias]}
    expected = generate(engine("ar", "good", target), PROMPT, SamplingParams(method="ar", **options), batch=3)
    assert len({tuple(tokens) for tokens in expected}) == 3
    for name in DRAFTERS:
        params = SamplingParams(**METHODS[method], **options)
        assert generate(engine(method, name, target), PROMPT, params, batch=3) == expected


class Decisions:
    """Random decisions, taken in every possible way: one way per run, with its probability."""

    def __init__(self) -> None:
        self._taken: list[int] = []
        self._open: list[int] = []  # options of each decision not tried yet
        self._place, self.probability = 0, 1.0

    def decide(self, weights: np.ndarray) -> int:
        options = np.flatnonzero(weights)
        if self._place == len(self._taken):
            self._taken.append(0)
            self._open.append(len(options) - 1)
        option = int(options[self._taken[self._place]])
        self._place += 1
        self.probability *= weights[option] / weights.sum()
        return option

    def runs(self) -> Iterator[None]:
        """Yields before each run; afterwards `probability` is that of the decisions it took."""
        while True:
            self._place, self.probability = 0, 1.0
            yield
            while self._open and not self._open[-1]:
                self._open.pop()
                self._taken.pop()
            if not self._open:
                return
            self._open[-1] -= 1
            self._taken[-1] += 1


class Decided(Noise):
    """Noise of one run: every draw is a decision, in proportion to its weights. That the decisions are independent is
    so only if no number is used for two of them, which is asserted here; that the numbers of different uses are
    independent is for test_noise.py."""

    def __init__(self, decisions: Decisions) -> None:
        self._decisions = decisions
        self._used: set[tuple[object, ...]] = set()

    def _decide(self, weights: np.ndarray, *use: object) -> int:
        assert use not in self._used, f"{use} decides twice"
        self._used.add(use)
        return self._decisions.decide(weights)

    def draw_logits(self, position: int, logits: np.ndarray, temperature: float) -> int:
        x = logits.astype(np.float64) / temperature
        return self._decide(np.exp(x - x.max()), "target", position)

    def draw(self, position: int, weights: np.ndarray, ids: np.ndarray | None) -> int:
        return self._decide(weights, "target", position)

    def draft(self, start: int, position: int, weights: np.ndarray, ids: np.ndarray) -> int:
        return self._decide(weights, "draft", start, position)

    def keeps(self, position: int, p: float, q: float) -> bool:
        return bool(self._decide(np.array([1 - min(1, p / q), min(1, p / q)]), "keep", position))

    def residual(self, position: int, weights: np.ndarray) -> int:
        return self._decide(weights, "residual", position) if weights.any() else -1


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("filtered", FILTERS)
@pytest.mark.parametrize("method", METHODS)
def test_every_possible_run_adds_up_to_the_targets_distribution(method: str, filtered: str, bias: str) -> None:
    """The exact distribution of three tokens: prefill, first round, second round."""
    target = MarkovTarget(vocab_size=3, seed=2, spread=1.0)
    filters = {**FILTERS[filtered], "top_k": 2} if "top_k" in FILTERS[filtered] else FILTERS[filtered]
    options = {"temperature": 0.7 if bias == "plain" else 1.0, "max_tokens": 3, **filters, **BIASES[bias]}
    options["logit_bias"] = {0: 0.7} if bias != "plain" else {}
    shape = {**METHODS[method], "tree_budget": 2} if method == "draft-model" else METHODS[method]
    params = SamplingParams(**shape, **options)
    for name in DRAFTERS:
        decisions = Decisions()

        class Deciding(Sampler):
            def __init__(self, *args: Any, decisions: Decisions = decisions) -> None:
                super().__init__(*args)
                self.noise = Decided(decisions)

        scripted = engine(method, name, target, block_size=3)
        scheduler = Scheduler(scripted)
        total: dict[tuple[int, ...], float] = {}
        for _ in decisions.runs():
            c = completion(scripted, PROMPT, params, sampler=Deciding)
            finish(scheduler, [c])
            total[tuple(c.output)] = total.get(tuple(c.output), 0) + decisions.probability
        expected = joint(target, params, PROMPT, 3)
        assert total.keys() == expected.keys()
        assert max(abs(total[outcome] - p) for outcome, p in expected.items()) < 1e-7  # logits are float32


def draws(
    method: str, name: str, target: MarkovTarget, params: dict[str, Any], count: int, batch: int
) -> Counter[tuple[int, ...]]:
    """The first three tokens of `count` completions."""
    scripted = engine(method, name, target)
    scheduler = Scheduler(scripted)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(count // batch):
        sampling = SamplingParams(seed=seed, max_tokens=3, **METHODS[method], **params)
        completions = [completion(scripted, PROMPT, sampling, index=i) for i in range(batch)]
        finish(scheduler, completions)
        counts.update(tuple(c.output) for c in completions)
    return counts


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("ar", "good"),
        ("dflash", "useless"),
        ("ddtree-4", "adversarial"),
        ("dflash-sample", "adversarial"),
        ("draft-model", "useless"),
        ("ddtree-4", "bilinear adversarial"),
        ("ddtree-32", "linked good"),
        ("ddtree-1", "useless"),
        ("ddtree-32", "bilinear useless"),
        ("dflash-sample", "bilinear adversarial"),
        ("dflash-sample", "linked good"),
    ],
)
def test_first_tokens_are_distributed_as_the_targets(method: str, name: str) -> None:
    target = MarkovTarget(vocab_size=5, seed=1)
    params = {"temperature": 0.9, "top_p": 0.95, **BIASES["penalties"]}
    counts = draws(method, name, target, params, 4000, batch=3)
    expected = joint(target, SamplingParams(**params), PROMPT, 3)
    assert chi_square(counts, expected) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("filtered", ["all", "top-k", "top-p"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_first_tokens_are_distributed_as_the_targets_in_the_full_table(
    method: str, temperature: float, filtered: str, bias: str, batch: int
) -> None:
    target = MarkovTarget(vocab_size=6, seed=4)
    params = {"temperature": temperature, **FILTERS[filtered], **BIASES[bias]}
    expected = joint(target, SamplingParams(**params), PROMPT, 3)
    for name in DRAFTERS:
        counts = draws(method, name, target, params, 21_000 // len(DRAFTERS), batch)
        assert chi_square(counts, expected) > FALSE_ALARM


@pytest.mark.parametrize(
    ("method", "name", "bias"),
    [
        ("dflash-sample", "good", "penalties"),
        ("dflash-sample", "useless", "plain"),
        ("dflash-sample", "adversarial", "plain"),
        ("dflash-sample", "bilinear adversarial", "plain"),
        ("dflash-sample", "linked good", "penalties"),
        ("draft-model", "good", "plain"),
        ("draft-model", "useless", "penalties"),
        ("draft-model", "adversarial", "plain"),
    ],
)
def test_long_paths_do_not_drift_from_the_targets_distribution(method: str, name: str, bias: str) -> None:
    """Every token against its exact distribution given all before, by the token before and its place in the round."""
    target = MarkovTarget(vocab_size=5, seed=6)
    length = 3000 if bias == "plain" else 300  # counts grow for ever: frequent tokens become impossible
    options = {**BIASES[bias], "frequency_penalty": 0.0} if bias != "plain" else {}
    tokens, rows, strata = [], [], []
    scripted = engine(method, name, target, max_seq_len=4000)
    for seed in range(6000 // length):
        params = SamplingParams(temperature=1, top_p=0.97, max_tokens=length, seed=seed, **METHODS[method], **options)
        c = completion(scripted, PROMPT, params)
        finish(Scheduler(scripted), [c])
        places = [0, *(place for size in c.metrics.acceptance_lengths for place in range(size))]
        for i, token in enumerate(c.output):
            context = [*PROMPT, *c.output[:i]]
            tokens.append(token)
            rows.append(distribution(target.row(context), params, PROMPT, context[len(PROMPT) :]))
            strata.append((context[-1], min(places[i], 1)))
    assert drift(tokens, rows, strata) > FALSE_ALARM


def test_the_tests_find_a_biased_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A residual that is not p − q is a likely mistake: each statistical test must see it."""
    target = MarkovTarget(vocab_size=5, seed=6)

    def draw_from_p(self: Sampler, logits: np.ndarray, drawn: Any) -> int:
        p = self.distribution(logits)
        q = drawn.probs[drawn.candidates == drawn.token].sum()
        kept = self.noise.keeps(self._position, p[drawn.token], q)
        return drawn.token if kept else self.noise.residual(self._position, p)

    monkeypatch.setattr(Sampler, "choose_against", draw_from_p)
    counts = draws("dflash-sample", "useless", target, {"temperature": 1.0}, 4000, batch=1)
    assert chi_square(counts, joint(target, SamplingParams(temperature=1), PROMPT, 3)) < FALSE_ALARM
    scripted = engine("dflash-sample", "useless", target, max_seq_len=8000)
    params = SamplingParams(temperature=1, max_tokens=6000, seed=0, method="dflash-sample")
    (output,) = generate(scripted, PROMPT, params)
    context = [*PROMPT, *output]
    rows = [distribution(target.row(context[:i]), params, PROMPT, ()) for i in range(len(PROMPT), len(context))]
    assert drift(output, rows, context[len(PROMPT) - 1 : -1]) < FALSE_ALARM


def test_the_tests_find_noise_that_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafted token that was not kept is replaced by the very noise it was drawn with: no such mistake may pass."""

    def draft(self: Noise, start: int, position: int, weights: np.ndarray, ids: np.ndarray) -> int:
        return _native.draw_weights(weights, self._residual, position, ids)

    monkeypatch.setattr(Noise, "draft", draft)
    target = MarkovTarget(vocab_size=5, seed=6)
    counts = draws("dflash-sample", "adversarial", target, {"temperature": 1.0}, 12_000, batch=1)
    assert chi_square(counts, joint(target, SamplingParams(temperature=1), PROMPT, 3)) < FALSE_ALARM
