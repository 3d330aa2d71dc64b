"""ONNX Runtime's lowering with matrix products in 8-bit integers: W8A8, for CPUs.

Weights are quantised once, with a scale for each output channel; activations as they come, with a scale for each row.
So the other rows of a pass do not change a row's product, as they would with one scale for a whole tensor
(`DynamicQuantizeMatMul`), and sums of integers are exact. All of that is one operator of ours, `DDTreeProduct`.
Everything but products of rows and weights stays in float32: embedding, norms, attention.

A row with a few values far larger than the others has no good scale. Hidden states are such rows, so the residual
stream is rotated (`rotation.py`), which costs nothing; what comes out of SwiGLU is too, and is rotated as it comes, by
a few additions a value.
"""

import math

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import plugins
from ddtree_trt.build.graph.lowering_onnxruntime import OnnxRuntimeGraph
from ddtree_trt.build.graph.ops import Fine, Make, Table
from ddtree_trt.build.graph.rotation import walsh

LARGEST = 127  # of a quantised value, to either side of zero
PANEL, STEP = 16, 4  # outputs whose weights lie together, and inputs of each: PANEL and STEP of cpu_product.h
PARTS = 64  # of a row of SwiGLU, or the largest divisor of both: one value of each are rotated together


class Int8Graph(OnnxRuntimeGraph):
    precision = "int8"
    rotates = True

    def linear(self, x: str, key: str, make: Make, out: str, gated: int = 0, fine: Fine | None = None) -> str:
        """What comes out of SwiGLU is transformed before it is rounded; fine outputs add a second product with what
        rounding took from their weights."""
        parts, extra = math.gcd(gated, PARTS) if gated else 0, fine[1] if fine else 0
        scales: list[NDArray[np.float32]] = []

        def packed() -> NDArray[np.uint8]:
            weight = make()
            if gated:
                weight = walsh(weight.T, parts).T / np.float32(parts)
            if extra:  # behind it what rounding takes from its last columns
                fine_columns = weight[:, -extra:]
                values, scale = quantize_channels(fine_columns)
                weight = np.concatenate((weight, fine_columns - values * scale), axis=1)
            values, scale = quantize_channels(weight)
            scales.append(scale)
            return pack(values)

        inputs = [x, self.weight(f"{key}.int8", packed, "uint8")]
        inputs.append(self.weight(f"{key}.scale", lambda: scales[0], "float32"))
        return self.op(plugins.PRODUCT, inputs, [out], domain=plugins.NAMESPACE, parts=parts, fine=extra)

    def head(self, x: str, table: Table, out: str) -> str:
        return self.linear(x, table.key, lambda: table.make().T, out)


def pack(values: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Integers [in, out] as `DDTreeProduct` reads them: 128 more, [out / PANEL, in / STEP, PANEL, STEP] with zeros for
    what is missing at the ends."""
    padded = np.pad(values, [(0, -size % of) for size, of in zip(values.shape, (STEP, PANEL), strict=True)])
    steps, panels = padded.shape[0] // STEP, padded.shape[1] // PANEL
    order = padded.reshape(steps, STEP, panels, PANEL).transpose(2, 0, 3, 1)
    return np.ascontiguousarray(order).view(np.uint8) ^ np.uint8(128)


def quantize_channels(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """(int8 values [in, out], scales [out]) of a weight [in, out], which is their product to half a scale. Symmetric:
    no value is below -127."""
    largest = np.maximum(weight.max(0), -weight.min(0))
    scale = np.maximum(largest, np.finfo(np.float32).tiny) / np.float32(LARGEST)
    values = np.empty(weight.shape, np.int8)
    for row, source in zip(values, weight, strict=True):  # row by row: the largest weight is not held twice
        np.rint(source / scale, out=row, casting="unsafe")
    return values, scale
