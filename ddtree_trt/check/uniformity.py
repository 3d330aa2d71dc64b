"""Test that tokens come from a given distribution: goodness of fit by the probability integral transform.

A token drawn from a distribution has a uniform place in it: the mass of all more probable tokens, plus a uniform share
of its own. Tokens at any position after any prefix can so be pooled in one chi-square test, and a bias towards likely
(say, drafted) tokens shows as too many places near 0. Where one token is nearly certain every sampler looks alike: such
positions are left out, which is fair because it is decided before the token is seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.errors import UsageError

BINS = 7  # few, since what goes wrong is a trend; and an even number of degrees, whose p-value has a closed form
FEWEST = 100  # draws: with fewer the test would find nothing but the crudest bias
CERTAIN = 0.95  # probability of the best token from which on a position is left out
FALSE_ALARM = 1e-4  # how often a correct sampler fails one test


@dataclass(frozen=True)
class UniformityTest:
    """A chi-square test of uniformity over BINS equal bins."""

    draws: int
    chi_square: float
    degrees: int
    p_value: float

    @property
    def passed(self) -> bool:
        return self.p_value >= FALSE_ALARM


def place_in_distribution(
    logits: NDArray[np.float32], token: int, temperature: float, rng: np.random.Generator
) -> float | None:
    """The place of `token` in softmax(logits [V] / temperature) ordered by falling probability.

    Uniform on [0, 1) if the token was drawn from it; None where the best token is all but certain.
    """
    x = logits.astype(np.float64)
    p = np.exp((x - x.max()) / temperature)
    p /= p.sum()
    if p.max() >= CERTAIN:
        return None
    ahead = (x > x[token]) | ((x == x[token]) & (np.arange(len(x)) < token))
    return float(min(p[ahead].sum() + rng.random() * p[token], np.nextafter(1, 0)))


def uniformity(places: Sequence[float]) -> UniformityTest:
    """Test that the places are uniform on [0, 1). Raises UsageError for fewer than FEWEST."""
    n = len(places)
    if n < FEWEST:
        raise UsageError(
            f"{n} sampled tokens at positions that are not all but certain are too few to test, at least {FEWEST} are "
            "needed; raise --seeds, or give 0 to leave the distribution test out"
        )
    counts = np.histogram(places, BINS, (0, 1))[0]
    expected = n / BINS
    statistic = float(((counts - expected) ** 2).sum() / expected)
    return UniformityTest(n, statistic, BINS - 1, chi_square_tail(statistic, BINS - 1))


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(χ² ≥ statistic) for an even number of degrees: a Poisson sum (Abramowitz and Stegun 26.4.21)."""
    half = statistic / 2
    terms = (k * math.log(half) - half - math.lgamma(k + 1) for k in range(degrees // 2))
    return 1.0 if half == 0 else min(1.0, sum(math.exp(t) for t in terms))
