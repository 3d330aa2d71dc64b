"""The DFlash drafter: its dimensions, and its tensors by their Hugging Face names.

A block of tokens is denoised in one pass. Keys and values of the context come from tapped target states, projected by
`fc` and normed; its layers are a decoder's. Its embedding and head are the target's unless it has its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated

from ddtree_trt.drafters.dflash.heads import Convolution, ConvolutionParts, PairHead, Selector, pair_head
from ddtree_trt.drafters.kind import differs
from ddtree_trt.drafters.tapped import BODY, OWN_HEAD, TapLayer, TappedDims, TappedKind
from ddtree_trt.models.decoder import (
    ATTENTION,
    LAYERS,
    MLP,
    TOKEN,
    VOCABULARY,
    BlockMask,
    Part,
    Shapes,
    TransformerDims,
    decoder_layers,
    final_norm,
    shapes_of,
    within_layer,
)
from ddtree_trt.reading import Between

BLOCK = Between(2, 4096)
WINDOW = Between(0, 1 << 30)
SCALE = Between(1e-6, 1e6)
CAP = Between(0, 1e6)
MARKOV_RANK = Between(0, 1 << 16)
ARCHITECTURE = "DFlashDraftModel"  # its class in config.json
SECTION = "dflash_config"  # its object in config.json
CONTEXT_NORM = "hidden_norm.weight"


@dataclass(frozen=True)
class DFlashDims(TappedDims):
    """A DFlash drafter: a block of `block_size` tokens is denoised in one pass over tapped target states."""

    block_size: Annotated[int, BLOCK]  # the bonus token and block_size − 1 masks
    mask_token_id: Annotated[int, TOKEN]
    tap_layers: tuple[TapLayer, ...]  # target layers whose output is tapped, M of them
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

    def mask(self, index: int) -> BlockMask:
        """What the block's rows see in layer `index`."""
        return BlockMask(self.windows[index] if self.windows else 0, bool(self.causal) and self.causal[index])

    @property
    def pair_head(self) -> PairHead | None:
        return pair_head(self)

    def features(self) -> list[str]:
        """Names of the fields in use that the first published checkpoints do not have."""
        common = {f.name for f in fields(TransformerDims)}
        own = (f for f in fields(self) if f.kw_only and f.name not in common)
        return [f.name for f in own if getattr(self, f.name) != f.default]


def context_norm(dims: DFlashDims) -> Part:
    return Part("context_norm", {CONTEXT_NORM: (dims.hidden_size,)})


def layer_convolutions(dims: DFlashDims, index: int) -> dict[str, ConvolutionParts]:
    """The convolutions of a layer by their places; none where the drafter has none."""
    found: dict[str, ConvolutionParts] = {}
    if (convolution := dims.convolution) is not None:
        for place in (ATTENTION, MLP):
            name, taps, hidden = f"{place}_conv", convolution.taps, dims.hidden_size
            source, kernels = f"{BODY}layers.{index}.{name}", (2 * taps * convolution.groups, hidden)
            found[place] = ConvolutionParts(
                Part(f"{name}.base", {f"{source}.base_kernel": (2, taps, hidden)}),
                Part(f"{name}.kernels", {f"{source}.kernel_projection.weight": kernels}),
            )
    return found


class DFlash(TappedKind):
    name = "dflash"
    title = "DFlash drafter"
    record = DFlashDims
    drafts = "block"
    dims: DFlashDims

    def __init__(self, dims: DFlashDims) -> None:
        super().__init__(dims)
        self.target_layers = dims.num_target_layers
        self.mask_token_id = dims.mask_token_id
        self.block_size = dims.block_size
        self.windowed = any(dims.windows)
        self.longest_draft = dims.draft_length
        self.pairs = dims.pair_head

    @property
    def borrowed_rows(self) -> Shapes:
        return {} if self.dims.draft_vocab_size is None or self.dims.own_head else {OWN_HEAD: self.head_shape}

    @property
    def unrounded(self) -> frozenset[str]:
        convolutions = [layer_convolutions(self.dims, i).values() for i in range(self.dims.num_layers)]
        parts = [part for each in convolutions for parts in each for part in parts]
        return super().unrounded | set(shapes_of([*parts, *(self.pairs.parts if self.pairs else ())]))

    def stored(self, *, tied: bool) -> Iterator[Part]:
        d, layers = self.dims, decoder_layers(self.dims, BODY)
        yield from (self.fc, context_norm(d))
        # One tensor over all layers: the context's keys and values of every layer come out of one product.
        for parts in zip(*(layer.projected for layer in layers), strict=True):
            yield Part(parts[0].name, shapes_of(parts), stacked=len(layers))
        for i, layer in enumerate(layers):
            yield from within_layer(i, layer.others, *layer_convolutions(d, i).values())
        yield from (final_norm(d, BODY), *self.own_tables, *self.to_target)
        if self.pairs is not None:
            yield from self.pairs.parts

    def contradiction(self) -> str | None:
        d = self.dims
        if not d.tap_layers:
            return "tap_layers is empty"
        for name, entries in (("windows", d.windows), ("causal", d.causal)):
            if entries and len(entries) != d.num_layers:
                return f"{name} has {len(entries)} entries for {d.num_layers} layers"
        if problem := super().contradiction():
            return problem
        if d.selector is not None and d.markov_rank:
            return f"it has a selector and a Markov head of rank {d.markov_rank}, and a head is one of them"
        if d.markov_gated and not d.markov_rank:
            return "markov_gated needs a markov_rank above 0"
        if d.selector is not None and d.selector.top > d.head_size:
            return f"selector.top {d.selector.top} is more than the {d.head_size} tokens of its head"
        if d.convolution is not None and d.hidden_size % d.convolution.groups:
            return f"convolution.groups {d.convolution.groups} does not divide hidden_size {d.hidden_size}"
        return None

    def misfit(self, target: TransformerDims) -> str | None:
        d = self.dims
        problem = super().misfit(target) or differs("hidden_size", d.hidden_size, "the target's", target.hidden_size)
        # Some for hybrids count the layer that predicts several tokens, too.
        beyond = target.num_layers + 1 if target.delta else None
        if problem is None and d.num_target_layers is not None and d.num_target_layers != beyond:
            problem = differs("num_target_layers", d.num_target_layers, "the target's layers", target.num_layers)
        problem = problem or self.taps_outside(target)
        if problem is None and d.mask_token_id >= target.vocab_size:
            return f"mask_token_id {d.mask_token_id} is not below vocab_size {target.vocab_size}"
        return problem


def default_tap_layers(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The target layers a published DFlash drafter taps when its config.json names none: one per drafter layer, evenly
    spread from the second layer to the third from last; halves round to even."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_draft_layers))
