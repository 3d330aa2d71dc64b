"""Rotary embedding: the cosines and sines that every backend rotates queries and keys by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def rotary_tables(head_dim: int, theta: float, rows: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosine and sine [rows, D/2] of positions 0 to rows − 1, computed in float64 and rounded once.

    Column j is the angle of elements j and j + D/2 of a head: position · theta^(−2j/D).
    """
    inverse = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.outer(np.arange(rows, dtype=np.float64), inverse)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
