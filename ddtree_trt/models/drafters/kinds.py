"""The kinds of drafters: what each needs of the target and of an engine, and what it offers to methods.

Everything that depends on the kind asks its record, or has a table by the record's name with a row for every kind: the
checkpoint's tensors, the graph, the stored weights, and the drafter of each engine (`make_drafter`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ddtree_trt.models.decoder import Part, TransformerDims, embedding, head
from ddtree_trt.models.drafters import dflash, eagle3
from ddtree_trt.models.drafters.dflash import DrafterDims
from ddtree_trt.models.drafters.eagle3 import Eagle3Dims
from ddtree_trt.models.drafters.heads import PairHead

KindName = Literal["dflash", "autoregressive", "eagle3"]  # as manifest.json has it

EMBEDDING, HEAD = "embedding", "head"  # names of tables
LONGEST_CHAIN = 16  # γ: most tokens an automatic budget has a drafter without a block draft per round


@dataclass(frozen=True)
class DrafterKind:
    """A drafter of one kind and of given dimensions."""

    name: KindName
    title: str  # in messages: "a DFlash drafter"
    # What it needs:
    language_model: bool  # its graph is the target's: a tree of tokens in, logits out
    tap_layers: tuple[int, ...] = ()  # target layers whose output it is conditioned on, M of them
    target_layers: int | None = None  # layers of the target it was trained for; None where any will do
    mask_token_id: int | None = None  # the input at positions that are to be drafted; None where there are none
    own_tables: tuple[Part, ...] = ()  # EMBEDDING and HEAD, as far as it does not use the target's; a head may be tied
    # What it offers:
    block_size: int | None = None  # tokens of its one pass; None where it drafts token by token
    pairs: PairHead | None = None  # scores each position's candidates by the one before; None: they have marginals
    longest_draft: int = LONGEST_CHAIN  # L of a block, else the most tokens of a chain that `auto` drafts in a round
    by_levels: bool = False  # each of its passes drafts a level of a tree; otherwise one token or the whole block
    rows_read_next: bool = False  # a row of its cache is made of a token's states and of the token behind it

    @property
    def at_once(self) -> bool:
        """Whether one pass gives the marginals [L, K] of all positions, from which a tree can be made. Otherwise each
        position costs a pass and follows from the tokens before it."""
        return self.block_size is not None


def _dflash(dims: DrafterDims) -> DrafterKind:
    return DrafterKind(
        name="dflash",
        title="DFlash drafter",
        language_model=False,
        tap_layers=dims.tap_layers,
        target_layers=dims.num_target_layers,
        mask_token_id=dims.mask_token_id,
        block_size=dims.block_size,
        own_tables=tuple(part for part in dflash.own_tables(dims) if part.name in (EMBEDDING, HEAD)),
        pairs=dims.pair_head,
        longest_draft=dims.draft_length,
    )


def _autoregressive(dims: TransformerDims) -> DrafterKind:
    title = "autoregressive drafter"
    return DrafterKind("autoregressive", title, language_model=True, own_tables=(embedding(dims), head(dims)))


def _eagle3(dims: Eagle3Dims) -> DrafterKind:
    return DrafterKind(
        name="eagle3",
        title="EAGLE-3 drafter",
        language_model=False,
        tap_layers=dims.tap_layers,
        own_tables=eagle3.own_tables(dims),
        by_levels=True,
        rows_read_next=True,
    )


# By name: the record of a kind's dimensions, and what is made of one. The records of two kinds differ.
_KINDS: Mapping[KindName, tuple[type[TransformerDims], Callable[[Any], DrafterKind]]] = {
    "dflash": (DrafterDims, _dflash),
    "autoregressive": (TransformerDims, _autoregressive),
    "eagle3": (Eagle3Dims, _eagle3),
}


def kind_of(dims: TransformerDims) -> DrafterKind:
    """The kind of the drafter that has these dimensions. A target's are those of an autoregressive drafter."""
    for record, make in _KINDS.values():
        if type(dims) is record:
            return make(dims)
    raise TypeError(f"no kind of drafter has dimensions of type {type(dims).__name__}")


def dims_record(name: object) -> type[TransformerDims]:
    """The record that a drafter's dimensions are read into, by the kind's name; TransformerDims for an unknown one."""
    return next((record for kind, (record, _) in _KINDS.items() if kind == name), TransformerDims)
