"""What the host's row compaction refuses; `test_plugins_round.py` has what it moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddtree_trt import _native

ROWS = 24


BUFFER = np.zeros((2, ROWS, 4), np.float32)
GOOD: dict[str, Any] = {
    "bases": np.array([BUFFER.ctypes.data], np.uint64),
    "heads": 2,
    "head_stride_bytes": BUFFER.strides[0],
    "row_bytes": BUFFER.strides[1],
    "start": 4,
    "keep": np.array([0, 2], np.int32),
    "rows": ROWS,
}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"keep": np.array([2, 2], np.int32)}, ValueError, r"keep\[1\] is 2"),
        ({"keep": np.array([3, 1], np.int32)}, ValueError, r"keep\[1\] is 1"),
        ({"keep": np.array([-1, 1], np.int32)}, ValueError, r"keep\[0\] is -1"),
        ({"keep": np.array([0, ROWS - 4], np.int32)}, ValueError, "below rows"),
        ({"keep": np.array([0, 1])}, TypeError, "keep must have dtype int32"),
        ({"keep": np.array([[0, 1]], np.int32)}, ValueError, "keep must have shape"),
        ({"start": -1}, ValueError, "start"),
        ({"start": ROWS}, ValueError, "below rows"),
        ({"start": 2**62}, ValueError, "below rows"),
        ({"heads": 0}, ValueError, "positive"),
        ({"row_bytes": 0}, ValueError, "positive"),
        ({"rows": 0}, ValueError, "positive"),
        ({"head_stride_bytes": BUFFER.strides[0] - 1}, ValueError, "head_stride_bytes"),
        ({"rows": ROWS + 1}, ValueError, "head_stride_bytes"),
        ({"bases": np.array([0], np.uint64)}, ValueError, "null"),
        ({"bases": np.array([1], np.int64)}, TypeError, "bases must have dtype uint64"),
    ],
)
def test_compact_rows_refuses(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        _native.compact_rows(**{**GOOD, **change})
    assert not BUFFER.any()


def test_gaps_between_heads_are_left_alone() -> None:
    whole = np.arange(2 * 32 * 4, dtype=np.int32).reshape(2, 32, 4)
    expected = whole.copy()  # eight rows after each head belong to someone else
    expected[:, 0:3] = whole[:, [1, 4, 23]]
    own = {"bases": np.array([whole.ctypes.data], np.uint64), "head_stride_bytes": whole.strides[0], "start": 0}
    _native.compact_rows(**{**GOOD, **own, "keep": np.array([1, 4, 23], np.int32)})
    np.testing.assert_array_equal(whole, expected)


def test_nothing_kept_and_no_buffer_are_fine() -> None:
    _native.compact_rows(**{**GOOD, "keep": np.array([], np.int32)})
    _native.compact_rows(**{**GOOD, "bases": np.array([], np.uint64)})
