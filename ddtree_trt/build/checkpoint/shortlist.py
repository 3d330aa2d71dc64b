"""The head of a drafter that drafts from a shortlist of the target's tokens: rows of the target's head.

A checkpoint with a draft vocabulary and no head of its own, whose `d2t` names the tokens. The head is most of a small
drafter's pass, and few tokens of a large vocabulary are worth drafting.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ddtree_trt.drafters.tapped import OWN_HEAD, TO_TARGET
from ddtree_trt.models.decoder import EMBEDDING, HEAD

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ddtree_trt.build.checkpoint.reader import Checkpoint


def with_rows_of_head(drafter: Checkpoint, target: Checkpoint) -> Checkpoint:
    """The drafter with the rows of the target's head that its draft vocabulary needs, where it brings no head for it;
    the drafter itself otherwise."""
    rows = drafter.kind.borrowed_rows
    if not rows:
        return drafter
    head = EMBEDDING if target.tie_word_embeddings else HEAD

    def read(name: str) -> NDArray[np.float32]:
        if name != OWN_HEAD:
            return drafter._read(name)
        offsets = np.rint(drafter.tensor(TO_TARGET)).astype(np.int64)
        return np.ascontiguousarray(target.tensor(head)[np.arange(len(offsets)) + offsets])

    return replace(
        drafter,
        dims=replace(cast(Any, drafter.dims), own_head=True),
        tensors={**drafter.tensors, OWN_HEAD: target.tensors[head]},
        shapes={**drafter.shapes, **rows},
        _read=read,
    )
