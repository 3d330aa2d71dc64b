"""Rotary embedding: frequencies, and the cosines and sines that every backend rotates queries and keys by."""

import math

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.models.rope_scaling import RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> NDArray[np.float64]:
    """Angle per position [D/2] of elements j and j + D/2 of a head: theta^(−2j/D), scaled.

    Every scaling mixes a frequency f with f/factor. `linear` takes f/factor; `llama3` goes from one to the other by the
    number of rotations within the positions of training; `yarn` by the index j, between the two indices that have
    `beta_fast` and `beta_slow` rotations.
    """
    plain = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return plain
    kept = _kept_share(plain, head_dim, theta, scaling)
    return plain * kept + plain / scaling.factor * (1 - kept)


def _kept_share(plain: NDArray[np.float64], head_dim: int, theta: float, s: RopeScaling) -> NDArray[np.float64]:
    """The share [D/2] of a frequency that stays as it is, from 0 to 1."""
    positions = s.original_max_position_embeddings
    if s.rope_type == "linear":
        return np.zeros_like(plain)
    if s.rope_type == "llama3":
        rotations = positions * plain / (2 * np.pi)
        return np.clip((rotations - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0, 1)

    def index(rotations: float) -> float:
        """The j, not whole, whose frequency has so many rotations within the positions."""
        return head_dim * math.log(positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index(s.beta_fast), index(s.beta_slow)
    if s.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step, as transformers has it
    return 1 - np.clip((np.arange(head_dim // 2) - first) / (last - first), 0, 1)


def rotary_tables(
    head_dim: int, theta: float, rows: int, scaling: RopeScaling | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosine and sine [rows, D/2] of positions 0 to rows − 1, computed in float64 and rounded once; both times the
    scaling's attention factor."""
    angles = np.outer(np.arange(rows, dtype=np.float64), inverse_frequencies(head_dim, theta, scaling))
    magnitude = 1.0 if scaling is None else scaling.attention_factor
    return (np.cos(angles) * magnitude).astype(np.float32), (np.sin(angles) * magnitude).astype(np.float32)
