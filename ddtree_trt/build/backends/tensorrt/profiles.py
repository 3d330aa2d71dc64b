"""The shapes a plan is compiled for: its optimisation profile, as data.

A plan has one profile, since TensorRT's builder takes distributive independence with a single one only. It is tuned for
a decoding round and takes a prompt's chunk too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ddtree_trt.artifact.manifest import Limits

if TYPE_CHECKING:
    from onnx import ValueInfoProto

Range = tuple[int, int, int]  # smallest, tuned for, largest
Profile = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]  # input → its shapes

_TUNED_TREE = 64  # tokens: where automatic budgets end up when verifying costs what reading the weights costs


def target_sizes(limits: Limits) -> dict[str, Range]:
    """Dimension → range. A prefill asks for the last row's logits only."""
    tree, slots, longest = 1 + limits.max_tree_budget, limits.max_batch, limits.max_tokens_per_pass
    tuned = min(_TUNED_TREE, tree)
    return {"N": (1, 1, slots), "T": (1, tuned, longest), "R": (1, tuned, slots * longest)}


def drafter_sizes(limits: Limits, block: int | None) -> dict[str, Range]:
    """Dimension → range: a round has at most a block of context rows. A drafter without a block is a language model and
    has the target's sizes."""
    if block is None:
        return target_sizes(limits)
    # With the block behind them they must fit a cache, which may be shorter than a chunk.
    round_, chunk = (min(rows, limits.max_seq_len) for rows in (block, max(limits.prefill_chunk, block)))
    tuned = -(-round_ // 2)
    return {"N": (1, 1, limits.max_batch), "C": (1, tuned, chunk), "C+block": (1 + block, tuned + block, chunk + block)}


def profile(inputs: Iterable[ValueInfoProto], sizes: Mapping[str, Range]) -> Profile:
    """The shapes of every input with named dimensions, all of which are in `sizes`."""
    shapes = {}
    for value in inputs:
        dims = value.type.tensor_type.shape.dim
        if any(dim.dim_param for dim in dims):
            ranges = [sizes[dim.dim_param] if dim.dim_param else (dim.dim_value,) * 3 for dim in dims]
            smallest, tuned, largest = zip(*ranges, strict=True)
            shapes[value.name] = (smallest, tuned, largest)
    return shapes
