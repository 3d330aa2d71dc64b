"""Row compaction in place against NumPy, bit for bit, with every other byte left alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from ddtree_trt import _native

ROWS = 24


def new_buffers(count: int, heads: int, width: int, dtype: type, seed: int) -> list[np.ndarray]:
    """`count` buffers [Hkv, S, D] of random bits."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (count, heads, ROWS, width * np.dtype(dtype).itemsize), np.uint8)
    return [buffer.view(dtype).copy() for buffer in raw]


def compact(buffers: list[np.ndarray], start: int, keep: list[int]) -> None:
    heads, rows, _ = buffers[0].shape
    _native.compact_rows(
        bases=np.array([b.ctypes.data for b in buffers], np.uint64),
        heads=heads,
        head_stride_bytes=buffers[0].strides[0],
        row_bytes=buffers[0].strides[1],
        start=start,
        keep=np.array(keep, np.int32),
        rows=rows,
    )


def check(buffers: list[np.ndarray], start: int, keep: list[int]) -> None:
    expected = [b.copy() for b in buffers]
    for before, after in zip(buffers, expected, strict=True):
        after[:, start : start + len(keep)] = before[:, [start + k for k in keep]]
    compact(buffers, start, keep)
    for found, wanted in zip(buffers, expected, strict=True):
        np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("window", range(9))
def test_every_kept_set_of_a_window(window: int) -> None:
    for size in range(window + 1):
        for keep in itertools.combinations(range(window), size):
            check(new_buffers(2, 2, 3, np.float32, window), start=5, keep=list(keep))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
def test_random_kept_sets(dtype: type) -> None:
    rng = np.random.default_rng(0)
    for seed in range(100):
        start = int(rng.integers(0, ROWS))
        window = ROWS - start
        keep = np.sort(rng.choice(window, rng.integers(0, window + 1), replace=False)).tolist()
        check(new_buffers(3, 4, 5, dtype, seed), start, keep)


def test_gaps_between_heads_are_left_alone() -> None:
    whole = np.arange(2 * 32 * 4, dtype=np.int32).reshape(2, 32, 4)
    buffer = whole[:, :ROWS]  # eight rows after each head belong to someone else
    expected = whole.copy()
    expected[:, 0:3] = whole[:, [1, 4, 23]]
    compact([buffer], 0, [1, 4, 23])
    np.testing.assert_array_equal(whole, expected)


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


def test_nothing_kept_and_no_buffer_are_fine() -> None:
    _native.compact_rows(**{**GOOD, "keep": np.array([], np.int32)})
    _native.compact_rows(**{**GOOD, "bases": np.array([], np.uint64)})
