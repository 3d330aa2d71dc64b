"""The part of a network that one process of several holds, and how parts of a result are put together.

Ranks split heads of attention and columns of MLPs, so that a layer's two last products are sums over ranks, and they
split the vocabulary, so that what is chosen from logits is gathered. Everything else is the same on every rank.
"""

from __future__ import annotations

from torch import Tensor


class Shard:
    """Rank `rank` of `size`. This class is the single process, which has nothing to exchange."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks, of x's shape; x may be overwritten."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """x [...] of every rank, by rank: [size, ...]."""
        return x[None]


ALONE = Shard()


def even_part(total: int, rank: int, size: int) -> tuple[int, int]:
    """(start, end) of a rank's part of `total` items; parts differ by one item at most."""
    return total * rank // size, total * (rank + 1) // size
