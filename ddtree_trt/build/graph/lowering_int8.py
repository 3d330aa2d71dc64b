"""ONNX Runtime's lowering with matrix products in 8-bit integers: W8A8, for CPUs.

Weights are quantised once, with a scale for each output channel; activations as they come, with a scale for each row.
So the other rows of a pass do not change a row's product, as they would with one scale for a whole tensor
(`DynamicQuantizeMatMul`), and sums of integers are exact. Everything but products of rows and weights stays in float32:
embedding, norms, attention, caches.

Activations are stored unsigned around 128 and weights signed, the types for which the CPU's kernels are fast.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.build.graph.lowering_onnxruntime import MICROSOFT, OnnxRuntimeGraph
from ddtree_trt.build.graph.ops import Make, Table

LARGEST = 127  # of a quantised value, to either side of zero
_ZERO_POINT = 128  # of activations
_SMALLEST = 1e-20  # divisor of a row of zeros


class Int8Graph(OnnxRuntimeGraph):
    """`OnnxRuntimeGraph` whose projections and head multiply 8-bit integers."""

    def linear(self, x: str, key: str, make: Make, out: str) -> str:
        return self._product(x, key, make, out)

    def head(self, x: str, table: Table, out: str) -> str:
        return self._product(x, f"{table.key}.head", lambda: table.make().T, out)

    def _product(self, x: str, key: str, make: Make, out: str) -> str:
        """Rows x [..., in] times the float32 weight [in, out] that `make` returns, both quantised."""
        scales: list[NDArray[np.float32]] = []

        def quantized() -> NDArray[np.int8]:
            values, scale = quantize_channels(make())
            scales.append(scale)
            return values

        weight = self.weight(f"{key}.int8", quantized, "int8")
        scale = self.weight(f"{key}.scale", lambda: scales[0], "float32")

        # A row over its largest value lies between -1 and 1, so that one scale quantises all rows.
        axis = self.constant("last_axis", np.array([-1], np.int64))
        largest = self.op("ReduceMax", [self.op("Abs", [x], [f"{out}.abs"]), axis], [f"{out}.max"])
        largest = self.op("Max", [largest, self._float("smallest", _SMALLEST)], [f"{out}.largest"])
        unit, middle = self._float("unit", 1 / LARGEST), self.constant("middle", np.array(_ZERO_POINT, np.uint8))
        rows = self.op("Div", [x, largest], [f"{out}.relative"])
        rows = self.op("QuantizeLinear", [rows, unit, middle], [f"{out}.rows"])
        # A zero point of its own: where sums of bytes overflow, the runtime makes weight and zero point unsigned, and
        # would do it twice to one that is shared.
        zero = self.constant(f"{key}.zero", np.array(0, np.int8))
        inputs = [rows, weight, unit, scale, middle, zero]
        relative = self.op("MatMulIntegerToFloat", inputs, [f"{out}.product"], domain=MICROSOFT)
        return self.op("Mul", [relative, largest], [out])

    def _float(self, name: str, value: float) -> str:
        return self.constant(name, np.array(value, np.float32))


def quantize_channels(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """(int8 values [in, out], scales [out]) of a weight [in, out], which is their product to half a scale. Symmetric:
    no value is below -127."""
    largest = np.maximum(weight.max(0), -weight.min(0))
    scale = np.maximum(largest, np.finfo(np.float32).tiny) / np.float32(LARGEST)
    values = np.empty(weight.shape, np.int8)
    for row, source in zip(values, weight, strict=True):  # row by row: the largest weight is not held twice
        np.rint(source / scale, out=row, casting="unsafe")
    return values, scale
