"""Which part of a target each rank holds: attention heads, columns of MLPs and of experts, rows of the vocabulary.

The drafter is whole on every rank: splitting its few layers would save no more than the sums over ranks would cost.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.weight_layout import TARGET
from ddtree_trt.errors import UsageError
from ddtree_trt.models.decoder import Part, TransformerDims
from ddtree_trt.runtime.options import MAX_RANKS, SPLIT


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
    """V tokens, of which this rank has `rows` from `start` on. With one rank each method is PyTorch's function."""

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
        """int64 [R]: the token with the highest of all ranks' logits [R, rows], the first of equal ones."""
        if self._shard.size == 1:
            return logits.argmax(-1)
        best, ids = logits.max(-1)
        values, ids = self._by_rank(best, ids)
        return ids.gather(0, values.argmax(0, keepdim=True))[0]

    def most_probable(self, logits: Tensor, k: int, *, kernels: bool, normalised: bool = True) -> tuple[Tensor, Tensor]:
        """The k highest of all ranks' logits [R, rows], falling, and their tokens: float32 and int [R, k], as
        log-probabilities if `normalised`. `kernels`: `torch.ops.ddtree` is there."""
        if kernels and self._shard.size == 1:
            best = logits.new_empty(len(logits), k)
            ids = torch.empty_like(best, dtype=torch.int32)
            torch.ops.ddtree.draft_top(logits, normalised, best, ids)
            return best, ids
        # The best k of all are among the best k of each rank. A rank with fewer rows fills up with what is never taken.
        best, ids = logits.topk(here := min(k, self.rows), -1)
        if self._shard.size > 1:
            found = self._by_rank(F.pad(best, (0, k - here), value=-torch.inf), F.pad(ids, (0, k - here)))
            values, tokens = (x.transpose(0, 1).flatten(1) for x in found)
            best, order = values.topk(k, -1)
            ids = tokens.gather(1, order)
        if not normalised:
            return best, ids
        total = logits.logsumexp(-1, keepdim=True)
        return best - (total if self._shard.size == 1 else self._shard.gather(total).logsumexp(0)), ids

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


Range = tuple[int, int]


class Cut(NamedTuple):
    """The part of a stored tensor that a rank holds: these ranges along an axis, joined."""

    axis: int
    ranges: Sequence[Range]

    def read(self, stored: Any, join: Callable[..., Any]) -> Any:
        """The part of what is sliced as arrays are, such as a safetensors slice; `join` joins pieces along an axis."""
        return join([stored[(slice(None),) * self.axis + (slice(*each),)] for each in self.ranges], self.axis)


def check_split(manifest: Manifest, size: int) -> None:
    """Raises UsageError, with what does not fit, where an engine cannot be split over `size` ranks."""
    if manifest.drafting.drafts != "block":
        raise UsageError(
            f"{SPLIT} {size} is for engines with a drafter of blocks, {manifest.name} has an "
            f"{manifest.drafting.title}; leave it out"
        )
    reason = _obstacle(manifest.target_dims, size)
    if reason is None:
        return
    fitting = [n for n in range(2, MAX_RANKS + 1) if _obstacle(manifest.target_dims, n) is None]
    advice = f"sizes that fit: {', '.join(map(str, fitting))}" if fitting else "no other size fits either: leave it out"
    raise UsageError(f"{SPLIT} {size} does not fit {manifest.name}: {reason}; {advice}")


def _obstacle(dims: TransformerDims, size: int) -> str | None:
    """What of a network cannot be divided by `size`; None where everything can."""
    if dims.delta is not None:
        return "its gated delta-net layers are not divided"
    for count, name in ((dims.num_heads, "attention heads"), (dims.intermediate_size, "columns of its MLP")):
        if count % size:
            return f"{count} {name} cannot be divided by {size}"
    kv = dims.num_kv_heads
    if kv % size and size % kv:
        return f"{kv} heads of keys and values can neither be divided by {size} nor be given to whole groups of ranks"
    return None if dims.vocab_size >= size else f"{dims.vocab_size} tokens are fewer than ranks"


def kv_heads(dims: TransformerDims, rank: int, size: int) -> Range:
    """The heads of keys and values of a rank; where there are fewer than ranks, several hold the same one."""
    if dims.num_kv_heads >= size:
        return even_part(dims.num_kv_heads, rank, size)
    head = rank * dims.num_kv_heads // size
    return head, head + 1


def local_manifest(manifest: Manifest, shard: Shard) -> Manifest:
    """The manifest with the dimensions of a rank's part of the target; the vocabulary is the whole one."""
    dims, size = manifest.target_dims, shard.size
    local = replace(
        dims,
        num_heads=dims.num_heads // size,
        num_kv_heads=max(dims.num_kv_heads // size, 1),
        intermediate_size=dims.intermediate_size // size,
    )
    return replace(manifest, target_dims=local)


def cut_of(weight: Part, dims: TransformerDims, shard: Shard) -> Cut | None:
    """The part of a stored weight that a rank holds, of a target with `dims`; None where every rank has it whole."""
    name, rank, size = weight.name.rpartition(".")[2], shard.rank, shard.size
    if size == 1 or not weight.name.startswith(TARGET):
        return None
    match name:
        case "embedding" | "head":
            return Cut(0, [even_part(dims.vocab_size, rank, size)])
        case "qkv" | "qkv_bias":
            heads = (even_part(dims.num_heads, rank, size), *[kv_heads(dims, rank, size)] * 2)
            return Cut(0, _behind_each_other(heads, dims.qkv_widths, dims.head_dim))
        case "gate_up":  # of every expert a gate, then what it lets through
            count = 2 * (dims.experts.count if dims.experts else 1)
            part = even_part(dims.intermediate_size, rank, size)
            return Cut(0, _behind_each_other([part] * count, [dims.intermediate_size] * count))
        case "o":
            return Cut(1, [even_part(dims.num_heads * dims.head_dim, rank, size)])
        case "down":
            return Cut(1, [even_part(dims.intermediate_size, rank, size)])
    return None


def _behind_each_other(parts: Sequence[Range], widths: Sequence[int], each: int = 1) -> list[Range]:
    """The ranges of parts, of `each` rows an item, of matrices that are stored one behind the other."""
    bases = accumulate(widths, initial=0)
    return [(base + start * each, base + end * each) for base, (start, end) in zip(bases, parts, strict=False)]
