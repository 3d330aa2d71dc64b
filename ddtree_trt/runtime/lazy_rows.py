"""Rows of logits that stay on the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]


class LazyRows:
    """Stands where logits [R, V] stand: reading a row brings that row over, and nothing else does.

    Greedy decoding reads none. Like the array it stands for, it is valid until the engine's next target pass.
    """

    def __init__(self, rows: int, width: int, fetch: Callable[[int, int], Row]) -> None:
        """`fetch(start, stop)` returns a copy of those rows, float32 [stop − start, V]."""
        self.shape = (rows, width)
        self._fetch = fetch

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """As NumPy's, for one row without reading the others."""
        if isinstance(index, int | np.integer):
            row = int(index) + (len(self) if index < 0 else 0)
            if not 0 <= row < len(self):
                raise IndexError(f"row {index} of {len(self)}")
            return self._fetch(row, row + 1)[0]
        return self.copy()[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.copy())

    def copy(self) -> Row:
        """All rows, float32 [R, V]."""
        return self._fetch(0, len(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.copy().astype(dtype or np.float32, copy=False)
