"""What drafters have in common that are conditioned on tapped target states: taps, fusion, and tables of their own in
place of the target's; a head may choose from a smaller vocabulary."""

from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, Any

from ddtree_trt.drafters.kind import EMBEDDING, HEAD, DrafterKind
from ddtree_trt.models.decoder import Part, Shape, TransformerDims
from ddtree_trt.reading import Between

LAYER = Between(0, 999)
TapLayer = Annotated[int, LAYER]

BODY = ""  # prefix of its layers and final norm
FC = "fc.weight"
OWN_EMBEDDING = "embed_tokens.weight"
OWN_HEAD = "lm_head.weight"
TO_TARGET = "d2t"  # integers [V']: a draft id plus its entry is the target's id
INTEGER_TENSORS = frozenset((TO_TARGET,))  # of a checkpoint; no id needs more than a float32's 24 bits


class TappedDims(TransformerDims):
    """Fields that the records of these kinds have, and what follows from them."""

    tap_layers: tuple[TapLayer, ...]  # target layers whose output is tapped, M of them
    draft_vocab_size: int | None  # V' of a smaller head
    own_embedding: bool
    own_head: bool

    @property
    def head_size(self) -> int:
        """V': tokens the head chooses from."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def taps_width(self) -> int:
        """M·H of the target: width of the tapped states of one token, side by side."""
        return len(self.tap_layers) * self.hidden_size

    def as_stored(self: Any, stored: Collection[str]) -> Any:
        """The drafter with the tables of its own among its checkpoint's tensors, of these names."""
        own_head = OWN_HEAD in stored or self.draft_vocab_size is not None
        return replace(self, own_embedding=OWN_EMBEDDING in stored, own_head=own_head)


class TappedKind(DrafterKind):
    dims: Any

    def __init__(self, dims: Any) -> None:
        super().__init__(dims)
        self.tap_layers = dims.tap_layers

    @property
    def head_shape(self) -> Shape:
        """Of its own head: [V', H]."""
        return self.dims.head_size, self.dims.hidden_size

    @property
    def fc(self) -> Part:
        """The projection of tapped states to the drafter's width."""
        return Part("fc", {FC: (self.dims.hidden_size, self.dims.taps_width)})

    @property
    def own_tables(self) -> tuple[Part, ...]:
        embedding = [Part(EMBEDDING, {OWN_EMBEDDING: self.dims.table})] if self.dims.own_embedding else []
        head = [Part(HEAD, {OWN_HEAD: self.head_shape})] if self.dims.own_head else []
        return (*embedding, *head)

    @property
    def unrounded(self) -> frozenset[str]:
        return frozenset((FC, OWN_EMBEDDING))

    @property
    def to_target(self) -> tuple[Part, ...]:
        """The map of draft ids to the target's, where its vocabulary is smaller."""
        size = self.dims.draft_vocab_size
        return () if size is None else (Part("to_target", {TO_TARGET: (size,)}, dtype="int32"),)

    def contradiction(self) -> str | None:
        d = self.dims
        if d.draft_vocab_size is not None and d.draft_vocab_size > d.vocab_size:
            return f"draft_vocab_size {d.draft_vocab_size} is more than vocab_size {d.vocab_size}"
        return None

    def taps_outside(self, target: TransformerDims) -> str | None:
        """Words on tapped layers that the target does not have."""
        outside = [i for i in self.tap_layers if not 0 <= i < target.num_layers]
        found = f"target_layer_ids {outside} are not layers of the target, which has {target.num_layers}"
        return found if outside else None
