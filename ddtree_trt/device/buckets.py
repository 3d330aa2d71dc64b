"""The sizes passes are padded to on a GPU, and how many captured passes follow from them.

Every size is a captured pass of its own, so there must be few.
"""

from __future__ import annotations


def buckets(largest: int) -> list[int]:
    """Numbers of tree tokens a graph is made for, rising to `largest`: a pass of T tokens takes the next one up.

    Matrix products work in tiles of 16 rows and more, so that finer steps would save nothing.
    """
    steps = [1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 32), *range(256, largest, 128)]
    return [*(t for t in steps if t < largest), largest]


def context_steps(block: int) -> list[int]:
    """Numbers of context rows C that a block drafter's pass is captured for, rising to a block of `block` tokens."""
    return [*(c for c in (1, 2, 4, 8, 16, 32, 64) if c < block), block]


MOST_CAPTURED = 256  # passes of one network of a TensorRT engine; the one unused longest makes room for another


def captured_passes(sizes: int, slots: int, *, neighbours: bool) -> int:
    """The most passes that a network of a TensorRT engine keeps captured, where a pass is padded to one of `sizes`
    sizes. It takes any number of `slots` slots, or with `neighbours` any range of them."""
    return min(sizes * (slots * (slots + 1) // 2 if neighbours else slots), MOST_CAPTURED)
