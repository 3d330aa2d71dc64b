"""Rows of logits that stay on the device until they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]


class LazyRows:
    """`base.Rows` in a device's memory: a row is copied to the host only when it is read.

    Greedy decoding reads none. Valid until the engine's next target pass.
    """

    def __init__(self, rows: int, width: int, fetch: Callable[[int, int], Row]) -> None:
        """`fetch(start, stop)` returns a copy of those rows, float32 [stop − start, width]."""
        self._rows = rows
        self._width = width
        self._fetch = fetch

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int, /) -> Row:
        index = row + self._rows if row < 0 else row
        if not 0 <= index < self._rows:
            raise IndexError(f"row {row} of {self._rows}")
        return self._fetch(index, index + 1)[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("rows on a device cannot be read without a copy")
        rows = self._fetch(0, self._rows) if self._rows else np.empty((0, self._width), np.float32)
        return rows.astype(dtype or np.float32, copy=False)
