"""Which part of a target each rank holds: attention heads, columns of MLPs and of experts, rows of the vocabulary.

The drafter is whole on every rank. It has few layers, so that what splitting them saves, a part of the time their
weights take to be read, is no more than the two sums over ranks that each would then wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.weight_layout import StoredWeight
from ddtree_trt.errors import UsageError
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.runtime.engines.torch.parallel.shard import Shard, even_part
from ddtree_trt.runtime.options import MAX_RANKS

Range = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """The part of a stored tensor that a rank holds: these ranges of rows, joined, or of its columns."""

    rows: tuple[Range, ...] = ()
    columns: Range | None = None

    def read(self, stored: Any, join: Callable[[list[Any]], Any]) -> Any:
        """The part of a tensor that is sliced as arrays are, such as a slice of a safetensors file; `join` joins
        pieces along their first axis."""
        if self.columns is not None:
            return stored[:, slice(*self.columns)]
        return join([stored[slice(*rows)] for rows in self.rows])


def check_split(manifest: Manifest, size: int) -> None:
    """Raises UsageError where an engine cannot be split over `size` ranks; its text says what does not fit, and the
    sizes that do."""
    if manifest.drafting.drafts != "block":
        raise UsageError(
            f"tensor_parallel_size {size} is for engines with a drafter of blocks, {manifest.name} has an "
            f"{manifest.drafting.title}; leave it out"
        )
    reason = _obstacle(manifest.target_dims, size)
    if reason is None:
        return
    fitting = [n for n in range(2, MAX_RANKS + 1) if _obstacle(manifest.target_dims, n) is None]
    advice = f"sizes that fit: {', '.join(map(str, fitting))}" if fitting else "no other size fits either: leave it out"
    raise UsageError(f"tensor_parallel_size {size} does not fit {manifest.name}: {reason}; {advice}")


def _obstacle(dims: TransformerDims, size: int) -> str | None:
    """What of a network cannot be divided by `size`; None where everything can."""
    for count, name in ((dims.num_heads, "attention heads"), (dims.intermediate_size, "columns of its MLP")):
        if count % size:
            return f"{count} {name} cannot be divided by {size}"
    kv = dims.num_kv_heads
    if kv % size and size % kv:
        return f"{kv} heads of keys and values can neither be divided by {size} nor be given to whole groups of ranks"
    return None if dims.vocab_size >= size else f"{dims.vocab_size} tokens are fewer than ranks"


def kv_heads(dims: TransformerDims, rank: int, size: int) -> Range:
    """The heads of keys and values that a rank holds. Where there are fewer heads than ranks, several ranks hold the
    one that their queries attend to."""
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


def cut_of(weight: StoredWeight, dims: TransformerDims, shard: Shard) -> Cut | None:
    """The part of a stored weight that a rank holds, of a target with `dims`; None where every rank has it whole."""
    make = _CUTS.get(weight.name.rpartition(".")[2])
    if shard.size == 1 or weight.network != "target" or make is None:
        return None
    return make(dims, shard.rank, shard.size)


def _vocabulary(dims: TransformerDims, rank: int, size: int) -> Cut:
    return Cut(rows=(even_part(dims.vocab_size, rank, size),))


def _qkv(dims: TransformerDims, rank: int, size: int) -> Cut:
    heads = (even_part(dims.num_heads, rank, size), *[kv_heads(dims, rank, size)] * 2)
    ranges, base = [], 0
    for (start, end), width in zip(heads, dims.qkv_widths, strict=True):
        ranges.append((base + start * dims.head_dim, base + end * dims.head_dim))
        base += width
    return Cut(rows=tuple(ranges))


def _o(dims: TransformerDims, rank: int, size: int) -> Cut:
    start, end = even_part(dims.num_heads, rank, size)
    return Cut(columns=(start * dims.head_dim, end * dims.head_dim))


def _gate_up(dims: TransformerDims, rank: int, size: int) -> Cut:
    return Cut(rows=tuple(_gates(dims, rank, size)))


def _gates(dims: TransformerDims, rank: int, size: int) -> Iterator[Range]:
    """A rank's columns of every gate and every up projection, which are stored one behind the other."""
    inner = dims.intermediate_size
    start, end = even_part(inner, rank, size)
    for base in range(0, 2 * inner * (dims.experts.count if dims.experts else 1), inner):
        yield base + start, base + end


def _down(dims: TransformerDims, rank: int, size: int) -> Cut:
    return Cut(columns=even_part(dims.intermediate_size, rank, size))


_CUTS: dict[str, Callable[[TransformerDims, int, int], Cut]] = {
    "embedding": _vocabulary,
    "head": _vocabulary,
    "qkv": _qkv,
    "qkv_bias": _qkv,
    "o": _o,
    "gate_up": _gate_up,
    "down": _down,
}
