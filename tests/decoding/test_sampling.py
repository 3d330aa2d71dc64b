"""The sampler against its documentation, and the acceptance rule of drawn drafts against its proof."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax
from truth import distribution

from ddtree_trt import _native
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.decoding.sampling import Noise, Sampler, logprob
from ddtree_trt.runtime.engines.base import DrawnFrom
from ddtree_trt.runtime.params import SamplingParams

VOCAB = 8
LOGITS = np.array([2.0, -1.0, 0.5, 1.5, 0.0, -0.5, 1.0, -3.0], np.float32)


def sampler(prompt: tuple[int, ...] = (1, 3), stops: tuple[int, ...] = (), index: int = 0, **options: Any) -> Sampler:
    return Sampler(SamplingParams(**options), VOCAB, list(prompt), frozenset(stops), index)


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-6, 0.3, 0.7, 1.0, 2.0, 100.0]),
        "top_k": st.integers(0, VOCAB + 2) | st.just(1000),
        "top_p": st.floats(0.05, 1) | st.just(1e-9),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0.5, 2),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3),
        "min_tokens": st.integers(0, 6),
    },
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@given(options=OPTIONS, prompt=TOKENS, output=TOKENS, seed=st.integers(0, 10**6))
@settings(max_examples=400)
def test_distribution_is_as_stated(options: dict[str, Any], prompt: list[int], output: list[int], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)
    params, stops = SamplingParams(**options), (2, 5)
    tested = Sampler(params, VOCAB, prompt, frozenset(stops))
    for together in (output[:1], output[1:]):  # as a round on the device gives them
        tested.observe(together)
    before = logits.copy()
    found = tested.distribution(logits)
    expected = np.array(distribution(logits, params, prompt, output, banned=stops))
    assert (logits == before).all(), "the engine's row is not the sampler's to write to"
    # Where the threshold of top_p or min_p falls between rounding errors, it may cut a token more or less.
    if not options.keys() & {"top_p", "min_p"}:
        assert (found > 0).tolist() == (expected > 0).tolist()
    if (found > 0).tolist() == (expected > 0).tolist():
        assert np.abs(found - expected).max() < 1e-5
    else:
        smallest = min(found[found > 0].min(), expected[expected > 0].min())
        differing = (found > 0) != (expected > 0)
        assert np.maximum(found, expected)[differing].max() <= smallest * (1 + 1e-4)


# Their sums are exact in any order.
WEIGHTS = st.lists(st.integers(0, 40).map(float) | st.integers(0, 30).map(lambda e: 2.0**-e), min_size=1, max_size=200)


@given(values=WEIGHTS, share=st.integers(0, 64).map(lambda s: s / 64))
def test_the_nucleus_is_the_smallest_set_of_the_largest(values: list[float], share: float) -> None:
    weights = np.array(values)
    order = sorted(range(len(values)), key=lambda i: -values[i])  # stable: of equal ones the first stay
    wanted, kept = share * sum(values), [0.0] * len(values)
    for i in order:
        kept[i] = values[i]
        if sum(kept) >= wanted:
            break
    _native.keep_nucleus(weights, share)
    assert weights.tolist() == kept


def test_a_nucleus_of_very_unequal_and_of_no_weights() -> None:
    falling = 2.0 ** -np.arange(0, 1000.0, 3)  # 1, 1/8, 1/64, … until far below the rounding of their sum
    for share, size in ((0.5, 1), (0.98, 2), (0.99, 3)):
        weights = falling.copy()
        _native.keep_nucleus(weights, share)
        assert np.flatnonzero(weights).tolist() == list(range(size))
    for empty in (np.zeros(0), np.zeros(5)):
        _native.keep_nucleus(empty, 0.5)
        assert not empty.any()


PROBS = st.lists(st.floats(0.01, 1), min_size=5, max_size=5)
HOLES = st.sets(st.integers(0, 4), max_size=4)


class Fixed(Noise):
    """Keeps or rejects as told, and shows what would then be drawn from."""

    def __init__(self, keep: bool) -> None:
        self.keep = keep

    def keeps(self, position: int, p: float, q: float) -> bool:
        return self.keep

    def residual(self, position: int, weights: np.ndarray) -> int:
        self.weights = weights.copy()
        return int(weights.argmax()) if weights.any() else -1


@given(p=PROBS, q=PROBS, p_holes=HOLES, q_holes=HOLES, width=st.integers(1, 5))
@settings(max_examples=300)
def test_acceptance_gives_back_the_targets_distribution(
    p: list[float], q: list[float], p_holes: set[int], q_holes: set[int], width: int
) -> None:
    """Σ over drafted tokens of q · (kept + rejected · residual) is p: by arithmetic, for any p and q."""
    target = np.array([0 if i in p_holes else v for i, v in enumerate(p)])
    with np.errstate(divide="ignore"):
        logits = np.log(target / target.sum()).astype(np.float32)
    candidates = np.array([3, 0, 4, 1, 2], np.int32)[:width]
    weights = np.array([0 if i in q_holes else v for i, v in enumerate(q)])[:width]
    if not weights.any():
        weights[0] = 1
    draft_probs = weights / weights.sum()
    tested = Sampler(SamplingParams(temperature=1), 5, [], frozenset())
    exact = tested.distribution(logits)
    emitted = np.zeros(5)
    for token, probability in zip(candidates.tolist(), draft_probs.tolist(), strict=True):
        if not probability:
            continue
        kept = min(1.0, exact[token] / probability)
        tested.noise = Fixed(keep=True)
        assert tested.choose_against(logits, DrawnFrom(token, candidates, draft_probs)) == token
        emitted[token] += probability * kept
        if kept < 1:
            tested.noise = rejecting = Fixed(keep=False)
            tested.choose_against(logits, DrawnFrom(token, candidates, draft_probs))
            emitted += probability * (1 - kept) * rejecting.weights / rejecting.weights.sum()
    assert np.abs(emitted - exact).max() < 1e-9


def test_a_draft_that_rounding_alone_rejects_is_kept() -> None:
    tested = Sampler(SamplingParams(temperature=1), 2, [], frozenset())
    tested.noise = Fixed(keep=False)
    logits = np.array([0.0, 0.0], np.float32)
    assert tested.choose_against(logits, DrawnFrom(1, np.array([0, 1], np.int32), np.array([0.5, 0.5]))) == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0.3, 0.2]),
        ({"temperature": 0.5}, [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]),
        ({"top_k": 2}, [0.625, 0.375]),
        ({"top_p": 0.6}, [0.625, 0.375, 0]),
        ({"min_p": 0.5}, [0.625, 0.375, 0]),
        ({"temperature": 0.0}, [1]),
    ],
    ids=str,
)
def test_draft_tokens_are_drawn_as_the_request_says(options: dict[str, Any], expected: list[float]) -> None:
    tested = sampler(**{"temperature": 1.0, "seed": 1, **options})
    log_probs, ids = np.log(np.array([0.5, 0.3, 0.2], np.float32)), np.array([4, 2, 6], np.int32)
    draws = [tested.draft(log_probs, ids, depth) for depth in range(300)]
    assert draws[0].probs == pytest.approx(expected, abs=1e-6)
    assert draws[0].candidates.tolist() == [4, 2, 6][: len(expected)]
    assert {d.token for d in draws} == {t for t, p in zip((4, 2, 6), expected, strict=False) if p}


# Penalties and minimum length along a path


@pytest.mark.parametrize(
    ("options", "takes"),
    [
        ({}, True),
        ({"top_p": 0.5, "top_k": 3, "min_p": 0.1}, True),
        ({"temperature": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"logit_bias": {1: 1}}, False),
        ({"min_tokens": 1}, False),
    ],
    ids=str,
)
def test_the_engines_choice_is_taken_only_where_it_is_the_answer(options: dict[str, Any], takes: bool) -> None:
    tested = sampler(**options)
    assert tested.takes_choices is takes
    if not tested.params.stochastic:
        assert tested.pick(6, LOGITS[None]) == (6 if takes else 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    broken = np.full(VOCAB, bad, np.float32)
    for tested in (sampler(), sampler(temperature=1), sampler(logit_bias={1: 1})):
        with pytest.raises(EngineError, match="logits are not finite"):
            tested.pick(0, broken[None])
    with pytest.raises(EngineError, match="drafter's log-probabilities are not finite"):
        sampler(temperature=1).draft(broken[:2], np.array([1, 2], np.int32), 0)


@given(st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=12), st.data())
def test_logprob_is_the_log_softmax_with_its_rank(values: list[float], data: st.DataObject) -> None:
    logits = np.array(values, np.float32)
    token, top = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, 15))
    found, expected = logprob(logits, token, top), log_softmax(logits.astype(np.float64))
    assert found.token_id == token
    assert found.logprob == pytest.approx(expected[token], abs=1e-9)
    assert found.rank == 1 + sum(v > values[token] for v in logits.tolist())
    assert len(found.top) == min(top, len(values))
    assert [p for _, p in found.top] == pytest.approx(sorted(expected, reverse=True)[: len(found.top)])
    assert all(p == pytest.approx(expected[t]) for t, p in found.top)
    assert len({t for t, _ in found.top}) == len(found.top)
