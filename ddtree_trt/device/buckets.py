"""The sizes passes are padded to on a GPU: every size is a captured pass of its own, so there must be few."""

from __future__ import annotations


def buckets(largest: int) -> list[int]:
    """Numbers of tree tokens a graph is made for, rising to `largest`: a pass of T tokens takes the next one up.

    Matrix products work in tiles of 16 rows and more, so that finer steps would save nothing.
    """
    steps = [1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 32), *range(256, largest, 128)]
    return [*(t for t in steps if t < largest), largest]
