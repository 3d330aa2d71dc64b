"""Products with 8-bit integers in ONNX Runtime: what is rounded, against NumPy.

`test_cpu_attention` runs this with other instruction sets, each in a process: it imports no more than it needs.
"""

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from ddtree_trt.build.graph.lowering_onnxruntime import LARGEST, Int8Graph, quantize_channels
from ddtree_trt.build.graph.ops import Fine, Table
from ddtree_trt.runtime.engines.onnxruntime.network import session_options

WIDTH, OUTPUTS = 48, 33


class Memory:
    """Weights inside the graph, so that a model is whole in memory."""

    def add(self, key: str, make: Any, dtype: str) -> TensorProto:
        return onnx.numpy_helper.from_array(np.ascontiguousarray(make()), key)


def session(
    weight: NDArray[np.float32], *, head: bool = False, gated: bool = False, fine: Fine | None = None, threads: int = 1
) -> ort.InferenceSession:
    """One product with a weight [in, out]: `y` [1, R, out] of rows `x` [1, R, in], or of gate and up."""
    g = Int8Graph("product", Memory())
    g.input("x", "float32", [1, "R", weight.shape[0] * (2 if gated else 1)])
    if head:
        g.head("x", Table("lm_head", "table", lambda: weight.T, weight.shape[::-1]), "y")
    else:
        g.linear("x", "weight", lambda: weight, "y", len(weight) if gated else 0, fine)
    g.output("y", "float32", [1, "R", weight.shape[1]])
    options = session_options(threads)
    return ort.InferenceSession(g.model().SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(product: ort.InferenceSession, x: NDArray[np.float32]) -> NDArray[np.float32]:
    (found,) = product.run(None, {"x": x[None]})
    return found[0]


def rounded_rows(x: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    largest = np.abs(x).max(-1, keepdims=True)
    return np.rint(x.astype(np.float64) / largest * LARGEST).astype(np.int64), largest / np.float32(LARGEST)


@pytest.mark.parametrize(("rows", "head"), [(1, False), (2, True), (17, False), (65, True)])
def test_a_product_is_the_integers_one(rows: int, head: bool) -> None:
    rng = np.random.default_rng(rows)
    weight = rng.standard_normal((WIDTH, OUTPUTS), dtype=np.float32)
    x = (rng.standard_normal((rows, WIDTH)) * np.exp(rng.normal(size=(rows, 1)) * 4)).astype(np.float32)
    found = run(session(weight, head=head), x)
    values, scales = quantize_channels(weight)
    whole, row_scales = rounded_rows(x)
    expected = (whole @ values.astype(np.int64)) * row_scales * scales
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7 * np.abs(expected).max())
    exact = x @ weight
    assert np.abs(found - exact).max() < 0.03 * np.abs(exact).max()  # and it is about the product itself


def test_sums_do_not_overflow() -> None:
    """The largest products there are, of one sign: kernels that add pairs of them in 16 bits are a third off."""
    weight, x = np.ones((256, 3), np.float32), np.ones((2, 256), np.float32)
    found = run(session(weight), x)
    np.testing.assert_allclose(found, np.full((2, 3), 256), rtol=1e-6)


@pytest.mark.parametrize("how", [{}, {"gated": True}, {"fine": (OUTPUTS - 8, 8)}], ids=str)
@pytest.mark.parametrize("width", [1, 17, WIDTH, 130, 640])
def test_a_row_does_not_depend_on_the_others(width: int, how: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((width, OUTPUTS), dtype=np.float32)
    alone, several = session(weight, **how), session(weight, threads=3, **how)
    x = rng.standard_normal((70, width * (2 if "gated" in how else 1)), dtype=np.float32)
    x[3] *= 1e6
    x[4] = 0
    single = np.concatenate([run(alone, row[None]) for row in x])
    for count in (*range(2, 18), 70):
        np.testing.assert_array_equal(run(several, x[:count]), single[:count])
    assert not single[4].any()


@pytest.mark.parametrize("width", [17, 130])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_no_number(width: int, value: float) -> None:
    x = np.ones((5, width), np.float32)
    x[[1, 2, 3], [0, width // 2, -1]] = value
    found = np.isfinite(run(session(np.ones((width, OUTPUTS), np.float32)), x))
    assert found[[0, 4]].all() and not found[1:4].any()


def test_fine_outputs_have_no_error_of_their_weights() -> None:
    """Only that of the rows remains, which is the same in all outputs; the others are as without fine ones."""
    rng = np.random.default_rng(2)
    weight, x = rng.standard_normal((WIDTH, OUTPUTS), dtype=np.float32), rng.standard_normal((9, WIDTH))
    found, plain = (run(session(weight, fine=fine), x.astype(np.float32)) for fine in ((OUTPUTS - 8, 8), None))
    whole, row_scales = rounded_rows(x.astype(np.float32))
    of_rows = (whole * row_scales.astype(np.float64)) @ weight
    np.testing.assert_allclose(found[:, -8:], of_rows[:, -8:], rtol=0, atol=1e-3)
    np.testing.assert_array_equal(found[:, :-8], plain[:, :-8])
    assert np.abs(plain - of_rows)[:, -8:].max() > 10 * np.abs(found - of_rows)[:, -8:].max()


@pytest.mark.parametrize(("width", "share"), [(192, 0.5), (72, 0.7)])
def test_rows_of_swiglu_keep_their_small_values(width: int, share: float) -> None:
    """One value thirty times larger than the others costs at most that share of what it does in a plain product."""
    rng = np.random.default_rng(width)
    weight = rng.standard_normal((width, OUTPUTS), dtype=np.float32)
    gate, up = rng.standard_normal((2, 9, width), dtype=np.float32)
    gate[:, 7], up[:, 7] = 30, 1
    x = gate / (1 + np.exp(-gate.astype(float))) * up
    exact = x @ weight
    plain = np.abs(run(session(weight), x.astype(np.float32)) - exact).mean()
    rotated = np.abs(run(session(weight, gated=True), np.concatenate([gate, up], axis=1)) - exact).mean()
    assert rotated < share * plain


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_rounding_a_weight(height: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((height, width)) * 10.0 ** rng.integers(-8, 8, width)).astype(np.float32)
    weight[:, rng.random(width) < 0.2] = 0
    values, scale = quantize_channels(weight)
    assert values.dtype == np.int8 and (scale > 0).all() and np.isfinite(scale).all()
    assert np.abs(values.astype(int)).max() <= LARGEST
    assert (np.abs(values * scale - weight) <= scale / 2 * (1 + 1e-5)).all()
    assert (np.abs(values).max(0) == LARGEST)[weight.any(0)].all()  # no scale is larger than it must be
