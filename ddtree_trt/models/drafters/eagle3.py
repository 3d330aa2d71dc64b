"""The EAGLE-3 drafter: its dimensions, and its tensors by their canonical names.

One decoder layer drafts a token per step. A row is made of a token and of the state before it: the tapped target states
of the token before, fused by `fc`, or the drafter's own output at the token before. Attention reads both, normed, side
by side; the residual stream is the state's alone. The head is the target's, or its own, which may choose from a smaller
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated

from ddtree_trt.models.decoder import (
    VOCABULARY,
    WIDTH,
    Layer,
    Part,
    Shapes,
    TransformerDims,
    decoder_layer,
    final_norm,
    shapes_of,
)
from ddtree_trt.models.drafters.dflash import LAYER, TO_TARGET

BODY = ""  # prefix of its layer and final norm
FC = "fc.weight"
STATE_NORM = "layers.0.hidden_norm.weight"
EMBEDDING = "embed_tokens.weight"  # where it has its own
HEAD = "lm_head.weight"  # likewise
EXPANDED = 10  # nodes that a pass expands, and children of each, as EAGLE is published
LEVELS = 8  # of a tree whose number of nodes is fixed, likewise
TAPS = 3  # M where a checkpoint names no layers


@dataclass(frozen=True)
class Eagle3Dims(TransformerDims):
    """An EAGLE-3 drafter. Its hidden size may differ from the target's where it has an embedding of its own."""

    # Target layers whose output is tapped, M of them; () until they follow from the target's layers.
    tap_layers: tuple[Annotated[int, LAYER], ...] = field(default=(), kw_only=True)
    target_hidden_size: Annotated[int, WIDTH] | None = field(default=None, kw_only=True)  # None: as its own
    draft_vocab_size: Annotated[int, VOCABULARY] | None = field(default=None, kw_only=True)  # V' of a smaller head
    own_embedding: bool = field(default=False, kw_only=True)  # without one it uses the target's
    own_head: bool = field(default=True, kw_only=True)  # likewise
    norm_before_residual: bool = field(default=False, kw_only=True)  # the residual stream starts at the normed state
    norm_output: bool = field(default=False, kw_only=True)  # the state fed back is the one after the final norm

    @property
    def head_size(self) -> int:
        """V': tokens the head chooses from."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def taps_width(self) -> int:
        """M·H of the target: width of the tapped states of one token, side by side."""
        return (len(self.tap_layers) or TAPS) * (self.target_hidden_size or self.hidden_size)


def most_expanded(width: int, levels: int) -> int:
    """Most nodes that a draft expands, `width` in a pass: the nodes of all levels but the last."""
    return width * (levels - 1)


def default_tap_layers(num_target_layers: int) -> tuple[int, ...]:
    """The target layers whose outputs a published EAGLE-3 drafter reads when its config.json names none: an early, a
    middle and a late one. EAGLE's own code counts them one higher, by the layer that reads them. Meaningful from 7
    layers on."""
    return 1, num_target_layers // 2 - 1, num_target_layers - 4


def eagle_layer(dims: Eagle3Dims) -> Layer:
    """The parts of the layer, whose attention reads rows [2·H]."""
    layer = decoder_layer(dims, 0, BODY)
    wide = {name: (rows, 2 * columns) for name, (rows, columns) in layer.qkv.shapes.items()}
    return replace(layer, qkv=Part(layer.qkv.name, wide))


def fc(dims: Eagle3Dims) -> Part:
    """The projection of tapped states to the drafter's width."""
    return Part("fc", {FC: (dims.hidden_size, dims.taps_width)})


def state_norm(dims: Eagle3Dims) -> Part:
    """The norm of the states that attention reads; that of embeddings is the layer's input norm."""
    return Part("state_norm", {STATE_NORM: (dims.hidden_size,)})


def own_tables(dims: Eagle3Dims) -> tuple[Part, ...]:
    """The embedding and the head over the draft vocabulary, as far as it has its own."""
    parts = []
    if dims.own_embedding:
        parts.append(Part("embedding", {EMBEDDING: dims.table}))
    if dims.own_head:
        parts.append(Part("head", {HEAD: (dims.head_size, dims.hidden_size)}))
    return tuple(parts)


def to_target(dims: Eagle3Dims) -> Part:
    """The map of draft ids to the target's of a drafter with a smaller vocabulary."""
    return Part("to_target", {TO_TARGET: (dims.head_size,)})


def eagle3_shapes(dims: Eagle3Dims) -> Shapes:
    """Every tensor of an EAGLE-3 drafter."""
    parts = [fc(dims), state_norm(dims), *eagle_layer(dims), final_norm(dims, BODY), *own_tables(dims)]
    if dims.draft_vocab_size is not None:
        parts.append(to_target(dims))
    return shapes_of(parts)


def eagle3_contradiction(dims: Eagle3Dims) -> str | None:
    """What of the fields cannot be true together, each of which is within its own range; None where there is none."""
    if dims.num_layers != 1:
        return f"num_layers is {dims.num_layers}, an EAGLE-3 drafter has 1"
    if dims.experts is not None:
        return "an EAGLE-3 drafter has no mixture of experts"
    if any(second <= first for first, second in pairwise(dims.tap_layers)):
        return f"tap_layers {list(dims.tap_layers)} do not rise"
    if dims.draft_vocab_size is not None and dims.draft_vocab_size > dims.vocab_size:
        return f"draft_vocab_size {dims.draft_vocab_size} is more than vocab_size {dims.vocab_size}"
    if dims.draft_vocab_size is not None and not dims.own_head:
        return f"draft_vocab_size is {dims.draft_vocab_size}, but the head is the target's"
    return None


def fitted(dims: TransformerDims, target: TransformerDims) -> TransformerDims:
    """The dimensions of a drafter of any kind beside its target: an EAGLE-3 drafter whose config.json names no layers
    taps those that follow from the target's."""
    if isinstance(dims, Eagle3Dims) and not dims.tap_layers and target.num_layers > 2 * TAPS:
        return replace(dims, tap_layers=default_tap_layers(target.num_layers))
    return dims
