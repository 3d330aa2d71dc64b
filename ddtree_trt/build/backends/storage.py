"""Weights as bytes of a precision, and the header of a safetensors file whose tensors are written one by one."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.build.backends.base import PrecisionName
from ddtree_trt.errors import BuildError

ITEM_BYTES: Mapping[PrecisionName, int] = {"fp32": 4, "fp16": 2, "bf16": 2}
_SAFETENSORS: Mapping[PrecisionName, str] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
_ALIGNMENT = 64  # bytes: of the data in a mapped file, for what reads 16 and more at a time
_BLOCK = 4 << 20  # values rounded at a time: the largest tensor is not held three times


def encode(values: NDArray[np.float32], precision: PrecisionName, name: str) -> NDArray[Any]:
    """The same values in a precision, little-endian; bf16 as its bits in uint16, since NumPy has no such type.

    `name` is what an error calls them. Raises BuildError when fp16 cannot hold one.
    """
    if precision == "fp32":
        return values.astype("<f4", copy=False)
    if precision == "bf16":
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


def safetensors_header(shapes: Mapping[str, Sequence[int]], precision: PrecisionName) -> bytes:
    """What a safetensors file of these tensors starts with; their data follows in the same order, without gaps."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + ITEM_BYTES[precision] * math.prod(shape)
        entries[name] = {"dtype": _SAFETENSORS[precision], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
