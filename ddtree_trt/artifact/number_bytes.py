"""Values as bytes of a number type: float32 to what a weight file stores, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.errors import BuildError

_BLOCK = 4 << 20  # values rounded at a time: the largest tensor is not held three times


def encode(values: NDArray[np.float32], dtype: str, name: str) -> NDArray[Any]:
    """The same values in float32, float16 or bfloat16, little-endian; bfloat16 as its bits in uint16, since NumPy has
    no such type.

    `name` is what an error calls them. Raises BuildError when float16 cannot hold one.
    """
    if dtype == "float32":
        return values.astype("<f4", copy=False)
    if dtype == "bfloat16":
        bits = values.astype("<f4", copy=False).view("<u4").reshape(-1)
        upper = np.empty(bits.size, "<u2")
        for start in range(0, bits.size, _BLOCK):
            part = bits[start : start + _BLOCK]
            # The upper half of a float32, rounded to the nearest, ties to even. Weights are finite: no NaN overflows.
            upper[start : start + _BLOCK] = (part + 0x7FFF + ((part >> 16) & 1)) >> 16
        return upper.reshape(values.shape)
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    if not np.isfinite(halves).all():
        raise BuildError(
            f"{name} has weights up to {float(np.abs(values).max()):g}, which fp16 cannot hold; use --precision bf16"
        )
    return halves


def decode(stored: NDArray[Any]) -> NDArray[np.float32]:
    """A float32 copy of values as `encode` returns them, which it holds exactly; uint16 is taken as bfloat16's bits."""
    if stored.dtype.kind != "u":  # integers too, those of a float32's 24 bits exactly
        return np.array(stored, np.float32)
    bits = np.array(stored, np.uint32)
    bits <<= 16
    return bits.view(np.float32)
