"""ONNX Runtime's lowering with matrix products in 8-bit integers: W8A8, for CPUs.

Weights are quantised once, with a scale for each output channel; activations as they come, with a scale for each row.
So the other rows of a pass do not change a row's product, as they would with one scale for a whole tensor
(`DynamicQuantizeMatMul`), and sums of integers are exact. Everything but products of rows and weights stays in float32:
embedding, norms, attention, caches.

A row with a few values far larger than the others has no good scale. Hidden states are such rows, so the residual
stream is rotated (`rotation.py`), which costs nothing; what comes out of SwiGLU is too, and is rotated as it comes, in
blocks.

Activations are stored unsigned around 128 and weights signed, the types for which the CPU's kernels are fast.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.build.graph.lowering_onnxruntime import MICROSOFT, OnnxRuntimeGraph
from ddtree_trt.build.graph.ops import Fine, Make, Table
from ddtree_trt.build.graph.rotation import rotate, rotation_matrix

LARGEST = 127  # of a quantised value, to either side of zero
_ZERO_POINT = 128  # of activations
BLOCK = 64  # values of an uneven row that are rotated together, or the largest divisor of both


class Int8Graph(OnnxRuntimeGraph):
    """`OnnxRuntimeGraph` whose projections and head multiply 8-bit integers."""

    precision = "int8"
    rotates = True

    def linear(self, x: str, key: str, make: Make, out: str, uneven: bool = False, fine: Fine | None = None) -> str:
        if fine is not None:
            return self._fine(x, key, make, out, fine)
        return self._uneven(x, key, make, out) if uneven else self._scaled(x, key, make, out)

    def head(self, x: str, table: Table, out: str) -> str:
        return self._scaled(x, table.key, lambda: table.make().T, out)

    def _uneven(self, x: str, key: str, make: Make, out: str) -> str:
        """As `_scaled`, where rows and the columns of the weight are rotated in blocks before they are quantised."""
        weight = make()
        block = math.gcd(len(weight), BLOCK)
        matrix = self.constant(f"rotation.{block}", rotation_matrix(block))
        parts = self.reshape(x, [0, 0, -1, block], f"{out}.blocks")
        x = self.reshape(self.product(parts, matrix, f"{out}.rotated"), [0, 0, -1], f"{out}.even")
        return self._scaled(x, key, lambda: np.ascontiguousarray(rotate(weight.T, block).T), out)

    def _fine(self, x: str, key: str, make: Make, out: str, fine: Fine) -> str:
        """As `_scaled`, where the last outputs add a second product with what rounding took from their weights."""
        first, last = fine
        both = self._scaled(x, key, lambda: with_remainders(make(), last), f"{out}.both")
        rest, rounded, remainders = self.split(
            both, (first, last, last), [f"{out}.{p}" for p in ("rest", "rounded", "off")]
        )
        return self.concat([rest, self.op("Add", [rounded, remainders], [f"{out}.fine"])], out, axis=-1)

    def _scaled(self, x: str, key: str, make: Make, out: str) -> str:
        """The product of rows that are quantised with a scale each.

        A row over its largest value lies between -1 and 1, so that one scale quantises all rows. A row of zeros over
        zero is no number; whatever integers that becomes, they are multiplied by zero in the end.
        """
        axis = self.constant("last_axis", np.array([-1], np.int64))
        largest = self.op("ReduceMax", [self.op("Abs", [x], [f"{out}.abs"]), axis], [f"{out}.largest"])
        relative = self.op("Div", [x, largest], [f"{out}.relative"])
        step = self.constant("unit", np.array(1 / LARGEST, np.float32))
        middle = self.constant("middle", np.array(_ZERO_POINT, np.uint8))
        rows = self.op("QuantizeLinear", [relative, step, middle], [f"{out}.rows"])
        product = self._multiply(rows, (step, middle), key, make, f"{out}.product")
        return self.op("Mul", [product, largest], [out])

    def _multiply(self, rows: str, meaning: tuple[str, str], key: str, make: Make, out: str) -> str:
        """Quantised rows [..., in], whose scale and zero point are `meaning`, times the float32 weight [in, out] that
        `make` returns, quantised."""
        scales: list[NDArray[np.float32]] = []

        def quantized() -> NDArray[np.int8]:
            values, scale = quantize_channels(make())
            scales.append(scale)
            return values

        weight = self.weight(f"{key}.int8", quantized, "int8")
        scale = self.weight(f"{key}.scale", lambda: scales[0], "float32")
        # A zero point of its own: where sums of bytes overflow, the runtime makes weight and zero point unsigned, and
        # would do it twice to one that is shared.
        zero = self.constant(f"{key}.zero", np.array(0, np.int8))
        step, middle = meaning
        return self.op("MatMulIntegerToFloat", [rows, weight, step, scale, middle, zero], [out], domain=MICROSOFT)


def quantize_channels(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """(int8 values [in, out], scales [out]) of a weight [in, out], which is their product to half a scale. Symmetric:
    no value is below -127."""
    largest = np.maximum(weight.max(0), -weight.min(0))
    scale = np.maximum(largest, np.finfo(np.float32).tiny) / np.float32(LARGEST)
    values = np.empty(weight.shape, np.int8)
    for row, source in zip(values, weight, strict=True):  # row by row: the largest weight is not held twice
        np.rint(source / scale, out=row, casting="unsafe")
    return values, scale


def with_remainders(weight: NDArray[np.float32], last: int) -> NDArray[np.float32]:
    """The weight [in, out], and behind it what `quantize_channels` takes from its last columns: [in, out + last]."""
    columns = weight[:, -last:]
    values, scale = quantize_channels(columns)
    return np.concatenate((weight, columns - values * scale), axis=1)
