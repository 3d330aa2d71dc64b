"""When the requests of an open loop arrive."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def poisson_arrivals(rate: float, count: int, seed: int) -> NDArray[np.float64]:
    """Seconds from the start at which `count` independent requests arrive, `rate` per second on average: float64
    [count], rising. One seed gives the same arrivals everywhere, and at another rate the same ones scaled."""
    return np.cumsum(np.random.default_rng(seed).exponential(size=count)) / rate
