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
from ddtree_trt.models.drafters.heads import (
    ATTENTION,
    MLP,
    ConvolutionParts,
    PairHead,
    convolution_parts,
    head_contradiction,
    markov_head,
    selector_head,
)
from ddtree_trt.models.drafters.heads import RANK as RANK
from ddtree_trt.models.drafters.heads import TAPS as TAPS
from ddtree_trt.models.drafters.heads import Convolution as Convolution
from ddtree_trt.models.drafters.heads import Selector as Selector
from ddtree_trt.reading import Between

BLOCK = Between(2, 4096)
LAYER = Between(0, 999)
WINDOW = Between(0, 1 << 30)
SCALE = Between(1e-6, 1e6)
CAP = Between(0, 1e6)
MARKOV_RANK = Between(0, 1 << 16)
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
    markov_gated: bool = field(default=False, kw_only=True)  # the hidden state gates the Markov head
    selector: Selector | None = field(default=None, kw_only=True)
    convolution: Convolution | None = field(default=None, kw_only=True)
    embedding_scale: Annotated[float, SCALE] = field(default=1.0, kw_only=True)  # embeddings of the block times this
    logit_scale: Annotated[float, SCALE] = field(default=1.0, kw_only=True)  # logits times this, and then
    logit_cap: Annotated[float, CAP] = field(default=0.0, kw_only=True)  # cap · tanh(logits / cap); 0: no cap

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

    @property
    def pair_head(self) -> PairHead | None:
        """The head that scores a candidate by the one before it; None where a position's candidates depend on none."""
        if self.selector is not None:
            return selector_head(self, self.selector, self.head_size)
        if self.markov_rank:
            return markov_head(self, self.markov_rank, self.head_size, gated=self.markov_gated)
        return None

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


def layer_convolutions(dims: DrafterDims, index: int) -> dict[str, ConvolutionParts]:
    """The convolutions of a layer by their places; none where the drafter has none."""
    if dims.convolution is None:
        return {}
    prefix = f"{BODY}layers.{index}."
    return {place: convolution_parts(dims, dims.convolution, place, prefix) for place in (ATTENTION, MLP)}


def dflash_shapes(dims: DrafterDims) -> Shapes:
    """Every tensor of a DFlash drafter."""
    layers = [part for layer in drafter_layers(dims) for part in layer]
    for index in range(dims.num_layers):
        layers += (part for parts in layer_convolutions(dims, index).values() for part in parts)
    head = dims.pair_head
    pairs = () if head is None else head.parts
    return shapes_of((fc(dims), context_norm(dims), *layers, final_norm(dims, BODY), *own_tables(dims), *pairs))


def borrowed_rows(dims: TransformerDims) -> Shapes:
    """The head that a checkpoint with a smaller draft vocabulary leaves out, because it is rows of the target's; {}
    where there is none."""
    if not isinstance(dims, DrafterDims) or dims.draft_vocab_size is None or dims.own_head:
        return {}
    return {OWN_HEAD: (dims.draft_vocab_size, dims.hidden_size)}


def dflash_contradiction(dims: DrafterDims) -> str | None:
    """What of the fields cannot be true together, each of which is within its own range; None where there is none."""
    for name, entries in (("windows", dims.windows), ("causal", dims.causal)):
        if entries and len(entries) != dims.num_layers:
            return f"{name} has {len(entries)} entries for {dims.num_layers} layers"
    if dims.draft_vocab_size is not None and dims.draft_vocab_size > dims.vocab_size:
        return f"draft_vocab_size {dims.draft_vocab_size} is more than vocab_size {dims.vocab_size}"
    return head_contradiction(
        dims, (dims.markov_rank, dims.markov_gated), dims.selector, dims.convolution, dims.head_size
    )


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
