"""The kinds of drafters. A new one is a package beside this module and an entry of `KINDS`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ddtree_trt.drafters.autoregressive.dims import Autoregressive
from ddtree_trt.drafters.dflash.dims import DFlash
from ddtree_trt.drafters.eagle3.dims import Eagle3
from ddtree_trt.drafters.kind import DrafterKind
from ddtree_trt.models.decoder import Shapes, TransformerDims

KINDS: dict[str, type[DrafterKind]] = {kind.name: kind for kind in (DFlash, Autoregressive, Eagle3)}

if TYPE_CHECKING:
    KindName = str
else:
    KindName = Literal[tuple(KINDS)]


def kind_of(dims: TransformerDims) -> DrafterKind:
    """The drafter that has these dimensions. A target's are those of an autoregressive drafter."""
    for kind in KINDS.values():
        if type(dims) is kind.record:
            return kind(dims)
    raise TypeError(f"no kind of drafter has dimensions of type {type(dims).__name__}")


def dims_record(name: object) -> type[TransformerDims]:
    """The record that a drafter's dimensions are read into, by the kind's name; TransformerDims for an unknown one."""
    return next((kind.record for kind in KINDS.values() if kind.name == name), TransformerDims)


def checkpoint_shapes(dims: TransformerDims, *, tied: bool) -> Shapes:
    """Shapes of every tensor of a network's checkpoint. With `tied` its head is its embedding."""
    return kind_of(dims).shapes(tied=tied)
