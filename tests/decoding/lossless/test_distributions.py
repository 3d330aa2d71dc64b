"""The distribution of what is drawn is the target's, whatever is drafted.

Three proofs: every random decision the loop can take is walked through (no draws, no false alarm); draws of the real
generator, also on engines of every kind of drafter, pass χ²; long paths do not drift. The last tests see that these
find a sampler that is wrong. `pytest -m slow tests/decoding/lossless/test_distributions.py` does many draws.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from drafts import LIES, with_lies
from engine_builds import CHATS
from matrix import CONSTRAINED, END, FORMS, METHODS, PENALTIES, PROMPT, QUALITIES, V, allowed, engine, text
from scripted import completion, finish, generate
from scripted_models import MarkovTarget
from truth import FALSE_ALARM, chi_square, distribution, drift, joint, last_row

from ddtree_trt.runtime.decoding.sampling import Noise, Sampler
from ddtree_trt.runtime.engines.base import Engine
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.scheduler import Scheduler

FILTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "top-k-p": {"top_k": 2, "top_p": 0.9, "min_p": 0.05},
}
BIASES: dict[str, dict[str, Any]] = {"plain": {}, "penalties": PENALTIES}
DRAFTERS = [(FORMS[(i + i // 4) % 4], quality) for i, quality in enumerate(q for q in QUALITIES for _ in FORMS)]


# Every decision


class Decisions:
    """Depth-first through every outcome of every random decision of a run."""

    def __init__(self) -> None:
        self._taken: list[int] = []  # index into the options of each decision
        self._open: list[int] = []  # options of each decision that are left
        self._place = 0
        self.probability = 1.0

    def decide(self, weights: np.ndarray) -> int:
        """The next option with a positive weight, at this place of the run."""
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
@pytest.mark.parametrize("method", [name for name in METHODS if name != "ddtree-16"])  # a tree of 12 is the largest
def test_every_possible_run_adds_up_to_the_targets_distribution(method: str, filtered: str, bias: str) -> None:
    """The exact distribution of three tokens: prefill, first round, second round. Every method meets every drafter."""
    target = MarkovTarget(vocab_size=3, seed=2, spread=1.0)
    biased = {**PENALTIES, "logit_bias": {0: 0.7}} if bias == "penalties" else {}
    options = {"temperature": 1.0 if biased else 0.7, "max_tokens": 3, **FILTERS[filtered], **biased}
    shape = {**METHODS[method], "tree_budget": 2} if method == "draft-model" else METHODS[method]
    params = SamplingParams(**shape, **options)
    expected = joint(target, params, PROMPT, 3)
    first = list(FILTERS).index(filtered) + 2 * (bias == "plain")
    for form, quality in DRAFTERS[first % 4 :: 4]:
        decisions = Decisions()

        class Deciding(Sampler):
            def __init__(self, *args: Any, decisions: Decisions = decisions) -> None:
                super().__init__(*args)
                self.noise = Decided(decisions)

        scripted = engine(method, target, form, quality, block_size=3)
        scheduler = Scheduler(scripted)
        total: dict[tuple[int, ...], float] = {}
        for _ in decisions.runs():
            c = completion(scripted, PROMPT, params, sampler=Deciding)
            finish(scheduler, [c])
            total[tuple(c.output)] = total.get(tuple(c.output), 0) + decisions.probability
        assert total.keys() == expected.keys()
        assert max(abs(total[outcome] - p) for outcome, p in expected.items()) < 1e-7  # logits are float32


# Draws


def drawn(engine: Engine, prompt: Sequence[int], count: int, batch: int, **params: Any) -> Counter[tuple[int, ...]]:
    scheduler, counts = Scheduler(engine), Counter[tuple[int, ...]]()
    for seed in range(count // batch):
        sampling = SamplingParams(seed=seed, max_tokens=3, ignore_eos=True, **params)
        completions = [completion(engine, prompt, sampling, index=i) for i in range(batch)]
        finish(scheduler, completions)
        counts.update(tuple(c.output) for c in completions)
    return counts


@pytest.mark.parametrize(
    ("method", "form", "quality"),
    [
        ("ar", "marginals", "good"),
        ("dflash", "marginals", "useless"),
        ("ddtree-4", "bilinear", "adversarial"),
        ("ddtree-32", "linked", "good"),
        ("dflash-sample", "marginals", "adversarial"),
        ("dflash-sample", "two candidates", "adversarial"),
        ("dflash-sample", "linked", "good"),
        ("draft-model", "marginals", "useless"),
    ],
)
def test_first_tokens_are_distributed_as_the_targets(method: str, form: str, quality: str) -> None:
    target = MarkovTarget(vocab_size=5, seed=1)
    params: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, **PENALTIES}
    counts = drawn(engine(method, target, form, quality), PROMPT, 1500, 3, **METHODS[method], **params)
    assert chi_square(counts, joint(target, SamplingParams(**params), PROMPT, 3)) > FALSE_ALARM


def restricted(target: MarkovTarget, params: SamplingParams, output: tuple[int, ...] = ()) -> dict[Any, float]:
    """The exact probability of every constrained output: at each step the target's row over what is allowed."""
    tokens = allowed(text(list(output)))
    if output[-1:] == (END,) or not tokens - {END}:
        return {output: 1.0}
    row = [x if token in tokens else -math.inf for token, x in enumerate(target.row([*PROMPT, *output]))]
    found: dict[Any, float] = {}
    for token, p in enumerate(distribution(row, params, PROMPT, output, [END])):
        if p > 0:
            found |= {tokens: p * q for tokens, q in restricted(target, params, (*output, token)).items()}
    return found


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "drawn": {"temperature": 1.0},
    "filtered": {"temperature": 0.9, "top_k": 3, "top_p": 0.9},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "logit_bias": {0: 1.5}},
    "shortest": {"temperature": 1.0, "min_tokens": 4},
}


def constrained_p_value(method: str, options: str, count: int, form: str = "marginals", seed: int = 1) -> float:
    """Of draws under a constraint, against a target of that seed."""
    made = engine(method, MarkovTarget(vocab_size=V, seed=1), form)
    expected = restricted(MarkovTarget(vocab_size=V, seed=seed), SamplingParams(**CONSTRAINTS[options]))
    counts, scheduler = Counter[tuple[int, ...]](), Scheduler(made)
    for seed in range(count):
        params = SamplingParams(seed=seed, **METHODS[method], **CONSTRAINTS[options])
        each = [completion(made, PROMPT, params, eos=[END], index=i, sampler=CONSTRAINED) for i in range(2)]
        finish(scheduler, each)
        assert all(c.finish_reason == "stop" for c in each)
        counts.update(tuple(c.output) for c in each)
    return chi_square(counts, expected)


@pytest.mark.parametrize(
    ("method", "options", "form"),
    [
        *[("ddtree-4", options, "linked") for options in ("drawn", "filtered", "shortest")],
        *[(method, "drawn", "marginals") for method in ("ar", "draft-model")],
        ("dflash-sample", "drawn", "bilinear"),
        ("draft-model", "penalties", "marginals"),
    ],
)
def test_draws_are_of_the_restricted_distribution(method: str, options: str, form: str) -> None:
    assert constrained_p_value(method, options, 100, form) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("options", CONSTRAINTS)
@pytest.mark.parametrize("method", METHODS)
def test_many_draws_are_of_the_restricted_distribution(method: str, options: str) -> None:
    assert constrained_p_value(method, options, 10_000) > FALSE_ALARM


@pytest.mark.parametrize(
    ("method", "form", "quality", "bias"),
    [
        ("dflash-sample", "marginals", "good", "penalties"),
        ("dflash-sample", "marginals", "useless", "plain"),
        ("dflash-sample", "bilinear", "adversarial", "plain"),
        ("dflash-sample", "linked", "good", "penalties"),
        ("draft-model", "marginals", "good", "plain"),
        ("draft-model", "marginals", "useless", "penalties"),
        ("draft-model", "marginals", "adversarial", "plain"),
    ],
)
def test_long_paths_do_not_drift_from_the_targets_distribution(method: str, form: str, quality: str, bias: str) -> None:
    """Every token against its exact distribution given all before, by the token before and its place in the round."""
    target = MarkovTarget(vocab_size=5, seed=6)
    length = 3000 if bias == "plain" else 300  # counts grow for ever: frequent tokens become impossible
    options = {**BIASES[bias], "frequency_penalty": 0.0}
    tokens, rows, strata = [], [], []
    scripted = engine(method, target, form, quality, max_seq_len=4000)
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


# Engines. Methods that draw nothing of their own have the tokens of `ar` (test_lossless_engines.py).

CASES = [
    ("dflash", "dflash-sample"),
    ("hybrid", "dflash-sample"),
    ("dspark", "dflash-sample"),
    ("autoregressive", "draft-model"),
]
BEST: dict[str, Any] = {"temperature": 1.0, "top_k": 3}


# An engine, its method, the prompt that leaves its target least sure of what follows, and the exact probability of the
# three tokens behind it, out of the three best at each step.
Opened = tuple[LLM, str, list[int], dict[tuple[int, ...], float]]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def opened(request: pytest.FixtureRequest, built: Any) -> Iterator[Opened]:
    kind, method = request.param
    with LLM(built(kind, "onnxruntime", "fp32"), threads=1) as llm:
        rows = SimpleNamespace(row=partial(last_row, llm))
        encoded = [llm.codec.encode(prompt) for prompt in CHATS[::5]]
        prompt = min(encoded, key=lambda ids: float(np.diff(np.sort(rows.row(ids))[-3:]).sum()))
        expected = joint(rows, SamplingParams(**BEST), prompt, 3)
        assert len(expected) == 27
        yield llm, method, prompt, expected


@pytest.mark.parametrize("count", [400, pytest.param(4000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("lies", LIES)
def test_engines_draw_from_the_targets_distribution(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, lies: str, count: int
) -> None:
    llm, method, prompt, expected = opened
    engine = llm.engine
    draft, vocab = engine.draft, engine.manifest.target_dims.vocab_size
    monkeypatch.setattr(engine, "draft", lambda asked: [with_lies(d, lies, vocab) for d in draft(asked)])
    found = drawn(engine, prompt, count, 4, method=method, tree_budget=3, **BEST)
    assert chi_square(found, expected) > FALSE_ALARM


# The tests find what is wrong


def test_the_tests_find_a_biased_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A residual that is not p − q is a likely mistake: each statistical test must see it."""
    target = MarkovTarget(vocab_size=5, seed=6)

    def draw_from_p(self: Sampler, logits: np.ndarray, drawn: Any) -> int:
        p = self.distribution(logits)
        q = drawn.probs[drawn.candidates == drawn.token].sum()
        kept = self.noise.keeps(self._position, p[drawn.token], q)
        return drawn.token if kept else self.noise.residual(self._position, p)

    monkeypatch.setattr(Sampler, "choose_against", draw_from_p)
    counts = drawn(
        engine("dflash-sample", target, quality="useless"), PROMPT, 4000, 1, method="dflash-sample", temperature=1
    )
    assert chi_square(counts, joint(target, SamplingParams(temperature=1), PROMPT, 3)) < FALSE_ALARM
    scripted = engine("dflash-sample", target, quality="useless", max_seq_len=8000)
    params = SamplingParams(temperature=1, max_tokens=6000, seed=0, method="dflash-sample")
    (output,) = generate(scripted, PROMPT, params)
    context = [*PROMPT, *output]
    rows = [distribution(target.row(context[:i]), params, PROMPT, ()) for i in range(len(PROMPT), len(context))]
    assert drift(output, rows, context[len(PROMPT) - 1 : -1]) < FALSE_ALARM


def test_the_tests_find_another_targets_distribution() -> None:
    assert constrained_p_value("ar", "drawn", 150, seed=2) < FALSE_ALARM
