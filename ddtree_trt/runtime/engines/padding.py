"""Trees of several slots as one target pass of a fixed size: control data and padding rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt.runtime.engines.base import VerifyRequest

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class PaddedTrees:
    """N trees of T rows each. A padding row repeats its root's token and position and sees only itself; its keys and
    values lie behind the tree's rows in the cache and are never committed."""

    slot_ids: Int32  # [N]
    past_len: Int32  # [N]
    token_ids: Int32  # [N, T]
    positions: Int32  # [N, T]
    tree_mask: Int32  # [N, T, W]: bit j % 32 of word j / 32 of row i is set where i sees node j


def write_mask(mask: NDArray[np.uint32], parents: Int32) -> None:
    """Ancestor-or-self bits of a tree's parents [n] into mask [T, W], which is all zeros; the rows from n on are
    padding."""
    size = len(parents)
    bits = _native.packed_mask(parents)
    mask[:size, : bits.shape[1]] = bits.view(np.uint32)
    padding = np.arange(size, len(mask), dtype=np.uint32)
    mask[padding, padding // 32] = np.uint32(1) << padding % np.uint32(32)


def mask_words(tokens: int) -> int:
    """W: the 32-bit words that hold one row of a mask over `tokens` new rows."""
    return -(-tokens // 32)


def pad_trees(requests: Sequence[VerifyRequest], lengths: Sequence[int], tokens: int, words: int) -> PaddedTrees:
    """The requests' trees padded to T = `tokens`, behind `lengths`[slot] committed rows; W = `words` per mask row."""
    count = len(requests)
    slots = np.array([r.slot for r in requests], np.int32)
    past = np.array([lengths[r.slot] for r in requests], np.int32)
    token_ids, positions = np.empty((count, tokens), np.int32), np.empty((count, tokens), np.int32)
    masks = np.zeros((count, tokens, words), np.uint32)
    for n, request in enumerate(requests):
        tree, size = request.tree, len(request.tree)
        token_ids[n], positions[n] = tree.token_ids[0], past[n]
        token_ids[n, :size], positions[n, :size] = tree.token_ids, past[n] + tree.depths
        write_mask(masks[n], tree.parents)
    return PaddedTrees(slots, past, token_ids, positions, masks.view(np.int32))
