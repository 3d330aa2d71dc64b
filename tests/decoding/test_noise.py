"""Noise that belongs to a token: the native rule against one written plainly, draws by it against the argmax they stand
for, and what a difference by rounding does to them."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from truth import FALSE_ALARM, chi_square

from ddtree_trt import _native
from ddtree_trt.runtime.decoding.sampling import Noise

SEEDS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**40 - 1)
MASK = 2**64 - 1


def bits(seed: int, position: int, token: int) -> int:
    """SplitMix64 at the counter of a token."""
    x = (seed + ((position << 24) + token + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def noise(value: int) -> float:
    uniform = min(float(np.float32((value >> 1 | 1) / 2**63)), 1 - 2**-24)
    return -math.log(-math.log1p(-uniform))


@given(seed=SEEDS, position=POSITIONS, token=st.integers(0, 2**24 - 1))
def test_the_rule(seed: int, position: int, token: int) -> None:
    assert _native.noise_bits(seed, position, token) == bits(seed, position, token)


@given(seed=SEEDS, position=POSITIONS)
@settings(max_examples=30)
def test_the_noise(seed: int, position: int) -> None:
    expected = [noise(bits(seed, position, token)) for token in range(300)]
    assert _native.gumbel(seed, position, 300) == pytest.approx(expected, rel=1e-12, abs=1e-15)


SIZES = st.sampled_from([1, 2, 7, 1000, 1023, 1024, 1025, 5000])


@given(
    seed=SEEDS,
    position=st.integers(0, 10**6),
    size=SIZES,
    temperature=st.sampled_from([1e-3, 0.3, 1.0, 2.0, 50.0]),
    spread=st.sampled_from([0.0, 1.0, 30.0, 1e5]),
    banned=st.sampled_from([0.0, 0.5, 0.999]),
    rows=st.integers(0, 10**6),
)
@settings(max_examples=300, deadline=None)
def test_a_draw_is_the_argmax_of_logits_and_noise(
    seed: int, position: int, size: int, temperature: float, spread: float, banned: float, rows: int
) -> None:
    """Whatever is left out because it cannot win: not the winner."""
    rng = np.random.default_rng(rows)
    logits = (rng.normal(0, 1, size) * spread).astype(np.float32)
    logits[rng.random(size) < banned] = -np.inf
    found = _native.draw_logits(logits, temperature, seed, position)
    if np.isneginf(logits).all():
        assert found == -1
        return
    values = logits + temperature * _native.gumbel(seed, position, size)
    assert found == int(values.argmax())
    with np.errstate(divide="ignore"):
        weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
        values = np.log(weights) + _native.gumbel(seed, position, size)
    found = _native.draw_weights(weights, seed, position)
    assert weights[found] > 0 and values[found] >= values.max() - 1e-9


@given(seed=SEEDS, ids=st.lists(st.integers(0, 2000), min_size=1, max_size=60, unique=True))
def test_noise_belongs_to_the_id_and_not_to_the_place(seed: int, ids: list[int]) -> None:
    """Some of the tokens, in any order, are drawn as all of them with no weight elsewhere."""
    rng = np.random.default_rng(len(ids))
    weights, whole = rng.random(len(ids)), np.zeros(2001)
    whole[ids] = weights
    drawn = ids[_native.draw_weights(weights, seed, 5, np.array(ids, np.int32))]
    assert drawn == _native.draw_weights(whole, seed, 5)
    assert _native.draw_weights(np.zeros(len(ids)), seed, 5, np.array(ids, np.int32)) == -1


def test_of_equals_the_lowest_id_is_drawn() -> None:
    """At a temperature at which no noise is seen."""
    for size in (3, 1024, 3000):
        logits = np.full(size, -1.0, np.float32)
        logits[size // 3 :: 5] = 7
        assert {_native.draw_logits(logits, 1e-30, seed, 0) for seed in range(20)} == {size // 3}


@pytest.mark.parametrize("place", [0, 1023, 1024, 2999])
def test_logits_that_are_not_finite_are_found_anywhere(place: int) -> None:
    for bad in (np.nan, np.inf):
        logits = np.zeros(3000, np.float32)
        logits[0] = 100  # wins long before
        logits[place] = bad
        assert _native.draw_logits(logits, 1.0, 1, 1) == -1


def test_arguments_are_checked() -> None:
    logits = np.zeros(4, np.float32)
    for temperature in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="temperature must be positive and finite"):
            _native.draw_logits(logits, temperature, 0, 0)
    with pytest.raises(TypeError, match="logits must have dtype float32"):
        _native.draw_logits(np.zeros(4), 1.0, 0, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_draws_are_in_proportion(temperature: float) -> None:
    logits = np.array([2.0, 0.0, -1.0, 1.0, -3.0, 0.5], np.float32)
    weights = np.exp(logits.astype(np.float64) / temperature)
    expected = {(t,): float(p) for t, p in enumerate(weights / weights.sum())}
    for seeds, positions in ((20_000, 1), (1, 20_000)):
        places = [(seed, position) for seed in range(seeds) for position in range(positions)]
        for draw in (
            lambda place: _native.draw_logits(logits, temperature, *place),
            lambda place: _native.draw_weights(weights, *place),
        ):
            assert chi_square(Counter((draw(place),) for place in places), expected) > FALSE_ALARM


def test_no_two_uses_share_a_number() -> None:
    """The target's draws, the drafter's by where its round began, and residuals: pairs drawn at the same positions are
    independent, and so are those of neighbouring positions and completions."""
    p = np.array([0.5, 0.3, 0.2])
    ids = np.arange(3, dtype=np.int32)
    first, second = Noise(4, 0), Noise(4, 1)
    assert Noise(4 + (1 << 32), 0).target_seed != second.target_seed
    draws: dict[str, Any] = {
        "target": lambda i: first.draw(i, p, None),
        "draft": lambda i: first.draft(i, i, p, ids),
        "draft of an earlier round": lambda i: first.draft(i - 1, i, p, ids),
        "residual": lambda i: first.residual(i, p),
        "next": lambda i: first.draw(i + 1, p, None),
        "other": lambda i: second.draw(i, p, None),
        "kept": lambda i: 0 if first.keeps(i, 0.5, 1.0) else 1 if first.keeps(i, 0.8, 1.0) else 2,
    }
    drawn = {name: [draw(i) for i in range(1, 8001)] for name, draw in draws.items()}
    expected = {(a, b): float(p[a] * p[b]) for a in range(3) for b in range(3)}
    for one in drawn:
        for two in drawn:
            if one < two:
                assert chi_square(Counter(zip(drawn[one], drawn[two], strict=True)), expected) > FALSE_ALARM, (one, two)
