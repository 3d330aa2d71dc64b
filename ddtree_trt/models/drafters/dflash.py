"""The DFlash drafter: its dimensions, and its tensors by their Hugging Face names.

A block of tokens is denoised in one pass. Keys and values of the context come from tapped target states, projected by
`fc` and normed; its layers are a decoder's. Its embedding and head are the target's unless it has its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated

from ddtree_trt.models.decoder import (
    LAYERS,
    TOKEN,
    VOCABULARY,
    Layer,
    Part,
    Shapes,
    TransformerDims,
    decoder_layers,
    final_norm,
    shapes_of,
)
from ddtree_trt.reading import Between

BLOCK = Between(2, 4096)
LAYER = Between(0, 999)
WINDOW = Between(0, 1 << 30)
RANK = Between(1, 1 << 16)
MARKOV_RANK = Between(0, 1 << 16)
TAPS = Between(1, 64)
ARCHITECTURE = "DFlashDraftModel"  # its class in config.json
SECTION = "dflash_config"  # its object in config.json
BODY = ""  # prefix of its layers and final norm
FC = "fc.weight"
CONTEXT_NORM = "hidden_norm.weight"
OWN_EMBEDDING = "embed_tokens.weight"
OWN_HEAD = "lm_head.weight"
TO_TARGET = "d2t"  # integers [V']: a draft id plus its entry is the target's id
INTEGER_TENSORS = frozenset((TO_TARGET,))  # of a checkpoint; no id needs more than a float32's 24 bits


@dataclass(frozen=True)
class Sight:
    """Which keys a row of the block sees in one layer, by their distance to its own position."""

    window: int = 0  # only those less than so many positions away, itself counted; 0: all
    causal: bool = False  # none behind it


ALL = Sight()


@dataclass(frozen=True)
class Selector:
    """A selector that scores each candidate by the one chosen before it."""

    top: Annotated[int, RANK]  # candidates of a position that it chooses from, C
    rank: Annotated[int, RANK]  # width r of its two codebooks [V, r]


@dataclass(frozen=True)
class Convolution:
    """Convolutions around every sublayer, over the rows of the block."""

    taps: Annotated[int, TAPS]  # rows that one result is made of
    groups: Annotated[int, RANK]  # parts of a row, each with its own dynamic kernel


@dataclass(frozen=True)
class DrafterDims(TransformerDims):
    """A DFlash drafter: a block of `block_size` tokens is denoised in one pass over tapped target states."""

    block_size: Annotated[int, BLOCK]  # the bonus token and block_size − 1 masks
    mask_token_id: Annotated[int, TOKEN]
    tap_layers: tuple[Annotated[int, LAYER], ...]  # target layers whose output is tapped, M of them
    num_target_layers: Annotated[int, LAYERS] | None  # None where the checkpoint does not say
    # Per layer, or () where no layer differs from the default:
    windows: tuple[Annotated[int, WINDOW], ...] = field(default=(), kw_only=True)  # positions a row sees; 0: all
    causal: tuple[bool, ...] = field(default=(), kw_only=True)  # a row of the block sees none behind it
    anchor_first: bool = field(default=False, kw_only=True)  # the bonus token's row predicts too
    draft_vocab_size: Annotated[int, VOCABULARY] | None = field(default=None, kw_only=True)  # V' of a smaller head
    own_embedding: bool = field(default=False, kw_only=True)  # None of the target's
    own_head: bool = field(default=False, kw_only=True)
    markov_rank: Annotated[int, MARKOV_RANK] = field(default=0, kw_only=True)  # 0: no Markov head
    selector: Selector | None = field(default=None, kw_only=True)
    convolution: Convolution | None = field(default=None, kw_only=True)

    @property
    def draft_length(self) -> int:
        """L: positions that one pass drafts."""
        return self.block_size if self.anchor_first else self.block_size - 1

    @property
    def head_size(self) -> int:
        """V': tokens the head chooses from."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    def sight(self, index: int) -> Sight:
        """What the block's rows see in layer `index`."""
        return Sight(self.windows[index] if self.windows else 0, bool(self.causal) and self.causal[index])

    def features(self) -> list[str]:
        """Names of the fields in use that the first published checkpoints do not have."""
        common = {f.name for f in fields(TransformerDims)}
        own = (f for f in fields(self) if f.kw_only and f.name not in common)
        return [f.name for f in own if getattr(self, f.name) != f.default]

    @property
    def taps_width(self) -> int:
        """M·H: width of the tapped states of one token, side by side."""
        return len(self.tap_layers) * self.hidden_size


def fc(dims: DrafterDims) -> Part:
    """The projection of tapped states to the drafter's width."""
    return Part("fc", {FC: (dims.hidden_size, dims.taps_width)})


def context_norm(dims: DrafterDims) -> Part:
    """The norm of the projected states."""
    return Part("context_norm", {CONTEXT_NORM: (dims.hidden_size,)})


def drafter_layers(dims: DrafterDims) -> list[Layer]:
    """The parts of every layer."""
    return decoder_layers(dims, BODY)


def own_tables(dims: DrafterDims) -> list[Part]:
    """The embedding, the head and the map of draft ids to the target's ids, as far as the drafter has its own."""
    parts = []
    if dims.own_embedding:
        parts.append(Part("embedding", {OWN_EMBEDDING: dims.table}))
    if dims.own_head:
        parts.append(Part("head", {OWN_HEAD: (dims.head_size, dims.hidden_size)}))
    if dims.draft_vocab_size is not None:
        parts.append(Part("to_target", {TO_TARGET: (dims.draft_vocab_size,)}))
    return parts


def dflash_shapes(dims: DrafterDims) -> Shapes:
    """Every tensor of a DFlash drafter."""
    layers = (part for layer in drafter_layers(dims) for part in layer)
    return shapes_of((fc(dims), context_norm(dims), *layers, final_norm(dims, BODY), *own_tables(dims)))


def dflash_contradiction(dims: DrafterDims) -> str | None:
    """What of the fields cannot be true together, each of which is within its own range; None where there is none."""
    for name, entries in (("windows", dims.windows), ("causal", dims.causal)):
        if entries and len(entries) != dims.num_layers:
            return f"{name} has {len(entries)} entries for {dims.num_layers} layers"
    if dims.draft_vocab_size is not None and dims.draft_vocab_size > dims.vocab_size:
        return f"draft_vocab_size {dims.draft_vocab_size} is more than vocab_size {dims.vocab_size}"
    if dims.draft_vocab_size is not None and not dims.own_head:
        return f"draft_vocab_size {dims.draft_vocab_size} needs a head of its own"
    return None


def default_tap_layers(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The target layers a published DFlash drafter taps when its config.json names none.

    One per drafter layer, evenly spread from the second layer to the third from last; halves round to even.
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    step = (last - first) / (num_draft_layers - 1)
    return tuple(round(first + i * step) for i in range(num_draft_layers))


def config_entries(dims: DrafterDims) -> dict[str, object]:
    """The entries of a drafter's config.json that its family does not have."""
    return {
        "architectures": [ARCHITECTURE],
        "block_size": dims.block_size,
        "num_target_layers": dims.num_target_layers,
        SECTION: {"mask_token_id": dims.mask_token_id, "target_layer_ids": list(dims.tap_layers)},
    }
