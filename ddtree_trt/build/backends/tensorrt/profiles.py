"""The shapes an engine is compiled for: optimisation profiles, as data.

A plan whose rows are independent has one profile, tuned for a decoding round, because TensorRT's builder takes
distributive independence with a single profile only. Other plans have two: profile 0 is a round's, profile 1 a
prompt's, the same layers tuned for few rows and for many. The last profile always takes a prompt's chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ddtree_trt.artifact.manifest import Limits

if TYPE_CHECKING:
    from onnx import ValueInfoProto

Range = tuple[int, int, int]  # smallest, tuned for, largest
Profile = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]  # input → its shapes

_TUNED_TREE = 64  # tokens: where automatic budgets end up when verifying costs what reading the weights costs


def target_sizes(limits: Limits) -> tuple[dict[str, Range], dict[str, Range]]:
    """Dimension → range, of a verification and of a prefill. A prefill asks for the last row's logits only."""
    tree, chunk, slots = 1 + limits.max_tree_budget, limits.prefill_chunk, limits.max_batch
    tuned = min(_TUNED_TREE, tree)
    return (
        {"N": (1, 1, slots), "T": (1, tuned, tree), "R": (1, tuned, slots * tree)},
        {"N": (1, 1, slots), "T": (1, chunk, chunk), "R": (1, 1, slots * chunk)},
    )


def drafter_sizes(limits: Limits, block: int | None) -> tuple[dict[str, Range], dict[str, Range]]:
    """Dimension → range: of the context rows of one round, at most a block, and of a prompt's chunk. A drafter without
    a block is a language model and has the target's sizes."""
    if block is None:
        return target_sizes(limits)
    # With the block behind them they must fit a cache, which may be shorter than a chunk.
    round_, chunk = (min(rows, limits.max_seq_len) for rows in (block, max(limits.prefill_chunk, block)))

    def sizes(tuned: int, most: int) -> dict[str, Range]:
        rows = {"C": (1, tuned, most), "C+block": (1 + block, tuned + block, most + block)}
        return {"N": (1, 1, limits.max_batch), **rows}

    return sizes(-(-round_ // 2), round_), sizes(chunk, chunk)


def covering(sizes: Sequence[Mapping[str, Range]]) -> dict[str, Range]:
    """The ranges of one profile in place of several, tuned as the first is."""
    return {
        name: (min(each[name][0] for each in sizes), tuned, max(each[name][2] for each in sizes))
        for name, (_, tuned, _) in sizes[0].items()
    }


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
