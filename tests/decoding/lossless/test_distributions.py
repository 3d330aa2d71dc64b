"""The distribution of what is drawn is the target's, whatever is drafted.

Three proofs: every random decision the loop can take is walked through (no draws, no false alarm); draws of the real
generator, also on engines of every kind of drafter, pass χ²; long paths do not drift. The last tests see that these
find a sampler that is wrong. `pytest -m slow tests/decoding/lossless/test_distributions.py` does many draws.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from drafts import LIES, with_lies
from matrix import CONSTRAINED, END, FORMS, METHODS, PENALTIES, PROMPT, QUALITIES, V, allowed, engine, text
from scripted import completion, finish, generate
from scripted_models import MarkovTarget
from truth import FALSE_ALARM, chi_square, distribution, drift, joint

from ddtree_trt import _native
from ddtree_trt.runtime.decoding.noise import Noise
from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.engines.base import Draft, DraftRequest, Engine, LogitRows, Verdict, VerifyRequest
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
    """The first three tokens of `count` completions."""
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("filtered", ["all", "top-k", "top-p"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_first_tokens_are_distributed_as_the_targets_in_the_full_table(
    method: str, temperature: float, filtered: str, bias: str
) -> None:
    target = MarkovTarget(vocab_size=6, seed=4)
    params: dict[str, Any] = {"temperature": temperature, **FILTERS[filtered], **BIASES[bias]}
    expected = joint(target, SamplingParams(**params), PROMPT, 3)
    for form, quality in DRAFTERS:
        for batch in (1, 3):
            counts = drawn(engine(method, target, form, quality), PROMPT, 3000, batch, **METHODS[method], **params)
            assert chi_square(counts, expected) > FALSE_ALARM


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


# Engines of every kind of drafter


class Remembering:
    """An engine whose drafts are changed, and that is asked every question once: what it says of given tokens is kept.

    A question is answered from the slot's tokens alone, wherever they came from, so that thousands of draws take
    seconds. A drafter that draws is asked anew every time.
    """

    threads, rounds, buckets, exact, mixes = 1, None, None, False, False

    def __init__(self, engine: Engine, lies: str) -> None:
        self.manifest = engine.manifest
        self._engine, self._lies = engine, lies
        slots = engine.manifest.limits.max_batch
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._trees: dict[int, VerifyRequest] = {}
        self._said: dict[Any, Any] = {}
        engine.truncate(0, 0)
        self._held: list[int] = []  # by slot 0 of the real engine, which answers for all

    def length(self, slot: int) -> int:
        return len(self._tokens[slot])

    def draftable(self, slot: int, length: int) -> int:
        return length

    def unseen(self, slot: int) -> int:
        return 0

    def restorable(self, slot: int, length: int) -> int:
        return length

    def truncate(self, slot: int, length: int) -> None:
        del self._tokens[slot][length:]

    def prefill(self, slot: int, token_ids: Any, *, rows: LogitRows, taps: bool) -> Verdict:
        self._tokens[slot] += token_ids.tolist()
        tokens = self._tokens[slot]
        return self._ask(("prefill", tuple(tokens)), lambda: self._bring(tokens))

    def warm_up(self, progress: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(r) for r in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        def ask() -> Draft:
            self._bring(self._tokens[request.slot])
            draft = self._engine.draft([replace(request, slot=0)])[0]
            return with_lies(draft, self._lies, self.manifest.target_dims.vocab_size)

        if self.manifest.drafter_kind == "autoregressive":
            return ask()
        return self._ask(("draft", tuple(self._tokens[request.slot]), request.bonus_token, request.top_k), ask)

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        verdicts = []
        for r in requests:
            self._trees[r.slot] = r
            key = "verify", tuple(self._tokens[r.slot]), r.tree.token_ids.tobytes(), r.tree.parents.tobytes()
            verdicts.append(self._ask(key, partial(self._verify, r)))
        return verdicts

    def _verify(self, request: VerifyRequest) -> Verdict:
        self._bring(self._tokens[request.slot])
        return copied(self._engine.verify([replace(request, slot=0)])[0])

    def commit(self, slot: int, path: Any, *, taps: bool) -> None:
        self._tokens[slot] += self._trees[slot].tree.token_ids[path].tolist()

    def close(self) -> None:
        pass

    def _ask(self, key: Any, ask: Callable[[], Any]) -> Any:
        if key not in self._said:
            self._said[key] = ask()
        return self._said[key]

    def _bring(self, tokens: list[int]) -> Verdict:
        """Fill the real slot with the tokens, the last common one anew: so there is a state the drafter has not seen,
        and none that it has seen with another token behind it."""
        same = next((i for i, (a, b) in enumerate(zip(self._held, tokens, strict=False)) if a != b), len(self._held))
        same = max(0, min(same, len(tokens)) - 1)
        self._engine.truncate(0, same)
        self._held = list(tokens)
        return copied(self._engine.prefill(0, np.array(tokens[same:], np.int64), rows="last", taps=True))

    def row(self, tokens: list[int], /) -> np.ndarray:
        """The logits [V] of what follows the tokens."""
        self.truncate(0, 0)
        return np.asarray(self.prefill(0, np.array(tokens), rows="last", taps=True).logits[-1])


def copied(verdict: Verdict) -> Verdict:
    return Verdict(verdict.choices.copy(), np.array(verdict.logits))


CASES = [
    ("dflash", "ddtree", 16),
    ("dflash", "dflash-sample", 3),
    ("dspark", "ddtree", 16),
    ("dspark", "dflash-sample", 3),
    ("eagle3", "eagle", 6),
    ("autoregressive", "draft-model", 3),
]


def engine_p_value(llm: LLM, prompts: list[Any], lies: str, count: int, *, anew: bool = False, **method: Any) -> float:
    """Of first tokens behind the prompt that leaves the target least sure, out of the three best at each step."""
    remembering = Remembering(llm.engine, lies)

    def sureness(ids: list[int]) -> float:
        return float(np.diff(np.sort(remembering.row(ids))[-3:]).sum())

    prompt = min((llm.codec.encode(prompt) for prompt in prompts[::5]), key=sureness)
    params: dict[str, Any] = {"temperature": 1.0, "top_k": 3}
    expected = joint(remembering, SamplingParams(**params), prompt, 3)
    assert len(expected) == 27
    asked: Any = llm.engine if anew else remembering
    return chi_square(drawn(asked, prompt, count, 4, **params, **method), expected)


@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize(("kind", "method", "budget"), CASES)
def test_engines_draw_from_the_targets_distribution(
    built: Any, prompts: list[Any], kind: str, method: str, budget: int, lies: str
) -> None:
    count = 200 if kind == "autoregressive" else 1200
    with LLM(built(kind, "onnxruntime", "fp32"), threads=1) as llm:
        assert engine_p_value(llm, prompts, lies, count, method=method, tree_budget=budget) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize(("kind", "method", "budget"), CASES)
def test_engines_that_are_asked_anew_draw_from_the_targets_distribution(
    built: Any, prompts: list[Any], monkeypatch: pytest.MonkeyPatch, kind: str, method: str, budget: int, lies: str
) -> None:
    with LLM(built(kind, "onnxruntime", "fp32"), threads=1) as llm:
        draft, vocab = llm.engine.draft, llm.engine.manifest.target_dims.vocab_size
        monkeypatch.setattr(llm.engine, "draft", lambda asked: [with_lies(d, lies, vocab) for d in draft(asked)])
        found = engine_p_value(llm, prompts, "none", 4000, anew=True, method=method, tree_budget=budget)
        assert found > FALSE_ALARM


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


def test_the_tests_find_noise_that_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafted token that was not kept is replaced by the very noise it was drawn with: no such mistake may pass."""

    def draft(self: Noise, start: int, position: int, weights: np.ndarray, ids: np.ndarray) -> int:
        return _native.draw_weights(weights, self._residual, position, ids)

    monkeypatch.setattr(Noise, "draft", draft)
    target = MarkovTarget(vocab_size=5, seed=6)
    made = engine("dflash-sample", target, quality="adversarial")
    counts = drawn(made, PROMPT, 12_000, 1, method="dflash-sample", temperature=1)
    assert chi_square(counts, joint(target, SamplingParams(temperature=1), PROMPT, 3)) < FALSE_ALARM


def test_the_tests_find_another_targets_distribution() -> None:
    assert constrained_p_value("ar", "drawn", 150, seed=2) < FALSE_ALARM
