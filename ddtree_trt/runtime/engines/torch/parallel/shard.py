"""The part of a network that one process of several holds, and how parts of a result are put together.

Ranks split heads of attention and columns of MLPs, so that a layer's two last products are sums over ranks, and they
split the vocabulary, so that what is chosen from logits is gathered. Everything else is the same on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


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


class Vocabulary:
    """V tokens, of which this rank has those from `start` on, `rows` of them. With one rank each method is PyTorch's
    function of that name."""

    def __init__(self, size: int, shard: Shard = ALONE) -> None:
        """`size` is V. Ids are exchanged as float32, which holds all of 24 bits."""
        self.size = size
        self.start, end = even_part(size, shard.rank, shard.size)
        self.rows = end - self.start
        self._shard = shard

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """The embeddings [..., H] of token_ids int [...] by this rank's rows of the table, [rows, H]."""
        if self._shard.size == 1:
            return F.embedding(token_ids, table)
        local = token_ids - self.start
        inside = (local >= 0) & (local < self.rows)
        found = F.embedding(local.clamp(0, self.rows - 1), table)
        return self._shard.all_reduce(found * inside[..., None])

    def argmax(self, logits: Tensor) -> Tensor:
        """int64 [R]: the token with the highest of this rank's logits [R, rows] and those of the others, the first of
        equal ones."""
        if self._shard.size == 1:
            return logits.argmax(-1)
        best, ids = logits.max(-1)
        values, ids = self._by_rank(best, ids)
        return ids.gather(0, values.argmax(0, keepdim=True))[0]

    def topk(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k highest of all ranks' logits [R, rows], falling, and their tokens: float32 and int64 [R, k]."""
        if self._shard.size == 1:
            return logits.topk(k, -1)
        here = min(k, self.rows)
        # The best k of all are among the best k of each rank. A rank with fewer rows fills up with what is never taken.
        best, ids = logits.topk(here, -1)
        found = self._by_rank(F.pad(best, (0, k - here), value=-torch.inf), F.pad(ids, (0, k - here)))
        values, ids = (x.transpose(0, 1).flatten(1) for x in found)
        values, order = values.topk(k, -1)
        return values, ids.gather(1, order)

    def logsumexp(self, logits: Tensor) -> Tensor:
        """float32 [R, 1]: over the logits [R, rows] of all ranks."""
        total = logits.logsumexp(-1, keepdim=True)
        return total if self._shard.size == 1 else self._shard.gather(total).logsumexp(0)

    def join(self, logits: Tensor) -> Tensor:
        """Whole rows [R, V] of the logits [R, rows] of all ranks, on every rank."""
        if self._shard.size == 1:
            return logits
        parts = [even_part(self.size, rank, self._shard.size) for rank in range(self._shard.size)]
        widest = max(end - start for start, end in parts)
        found = self._shard.gather(F.pad(logits, (0, widest - self.rows)))
        return torch.cat([part[:, : end - start] for part, (start, end) in zip(found, parts, strict=True)], 1)

    def _by_rank(self, values: Tensor, local_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Values and tokens [size, ...] of all ranks, from this one's values [...] and ids among its rows."""
        found = self._shard.gather(torch.stack((values, (local_ids + self.start).float())))
        return found[:, 0], found[:, 1].long()
