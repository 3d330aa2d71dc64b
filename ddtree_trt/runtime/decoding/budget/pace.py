"""How long rounds of several slots take against what the latency profile says, learnt from every round.

The profile has the fastest passes of a short context, one after the other. Rounds do the host's work as well, on caches
that have left the processor's, and beside other work. Most of that slows rounds with and without drafts alike and
changes no choice. What slows one kind more decides whether drafting pays, and a kind that looks too dear would never be
tried again. So both are estimated together, by a Kalman filter of the logarithms of their ratios to the profile: what
one kind of round shows is believed of the other too, the more the longer that was not seen.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PRIOR, PRIOR_SHARED = 0.3, 0.5  # standard deviation of a logarithm before any round, and the correlation of the two
DRIFT, DRIFT_SHARED = 0.02, 0.98  # the same of what changes from round to round
NOISE = 0.15  # standard deviation of one round's logarithm
SURPRISE = 0.5  # most difference from what was expected that is believed: a round may have waited for other work
MOST = math.log(4.0)


class Ratios(NamedTuple):
    """Seconds of rounds without and with drafts, over those of the profile."""

    single: float
    drafted: float

    @property
    def dearness(self) -> float:
        """Of rounds with drafts, against those without."""
        return self.drafted / self.single


PROFILED = Ratios(1.0, 1.0)


class Pace:
    """Rounds of one number of slots: without drafts (0) and with them (1)."""

    def __init__(self, like: Pace | None = None) -> None:
        """`like`: the pace that is expected at first; None for the profile's."""
        self._logs: NDArray[np.float64] = np.zeros(2) if like is None else like._logs
        self._covariance = _covariance(PRIOR, PRIOR_SHARED)

    @property
    def ratios(self) -> Ratios:
        """To a hundredth, so that costs that depend on them are often the ones known already."""
        return Ratios(*(round(math.exp(log), 2) for log in self._logs.tolist()))

    @property
    def hope(self) -> float:
        """How much faster rounds without drafts may well be than is known, where they are known less than those with
        drafts: then one is tried, which is short. Rounds with drafts are tried by probes."""
        (single, both), (_, drafted) = self._covariance.tolist()
        of_single, of_drafted = math.sqrt(single - both**2 / drafted), math.sqrt(drafted - both**2 / single)
        return max(1.0, math.exp(of_single - of_drafted))  # the deviation of each, given the other

    def learn(self, drafted: bool, ratio: float) -> None:
        """Take the time of a round, over what the profile says."""
        kind = int(drafted)
        self._covariance = self._covariance + _DRIFTS
        surprise = min(max(math.log(max(ratio, 1e-9)) - self._logs[kind], -SURPRISE), SURPRISE)
        gain = self._covariance[kind] / (self._covariance[kind, kind] + NOISE**2)
        self._logs = np.clip(self._logs + gain * surprise, -MOST, MOST)
        self._covariance = self._covariance - np.outer(gain, self._covariance[kind])


def _covariance(deviation: float, shared: float) -> NDArray[np.float64]:
    return deviation**2 * np.array([[1.0, shared], [shared, 1.0]])


_DRIFTS = _covariance(DRIFT, DRIFT_SHARED)
