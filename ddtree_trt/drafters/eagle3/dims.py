"""The EAGLE-3 drafter: its dimensions, and its tensors by their canonical names.

One decoder layer drafts a token per step. A row is made of a token and of the state before it: the tapped target states
of the token before, fused by `fc`, or the drafter's own output at the token before. Attention reads both, normed, side
by side; the residual stream is the state's alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated

from ddtree_trt.drafters.kind import differs
from ddtree_trt.drafters.tapped import BODY, TapLayer, TappedDims, TappedKind
from ddtree_trt.models.decoder import (
    VOCABULARY,
    WIDTH,
    Layer,
    Part,
    TransformerDims,
    decoder_layer,
    final_norm,
    within_layer,
)

STATE_NORM = "layers.0.hidden_norm.weight"
TAPS = 3  # M where a checkpoint names no layers


@dataclass(frozen=True)
class Eagle3Dims(TappedDims):
    """An EAGLE-3 drafter. Its hidden size may differ from the target's where it has an embedding of its own."""

    # Target layers whose output is tapped, M of them; () until they follow from the target's layers.
    tap_layers: tuple[TapLayer, ...] = field(default=(), kw_only=True)
    target_hidden_size: Annotated[int, WIDTH] | None = field(default=None, kw_only=True)  # None: as its own
    draft_vocab_size: Annotated[int, VOCABULARY] | None = field(default=None, kw_only=True)  # V' of a smaller head
    own_embedding: bool = field(default=False, kw_only=True)  # without one it uses the target's
    own_head: bool = field(default=True, kw_only=True)  # likewise
    norm_before_residual: bool = field(default=False, kw_only=True)  # the residual stream starts at the normed state
    norm_output: bool = field(default=False, kw_only=True)  # the state fed back is the one after the final norm

    @property
    def taps_width(self) -> int:
        """M·H of the target: width of the tapped states of one token, side by side."""
        return (len(self.tap_layers) or TAPS) * (self.target_hidden_size or self.hidden_size)


def default_tap_layers(num_target_layers: int) -> tuple[int, ...]:
    """The target layers whose outputs a published EAGLE-3 drafter reads when its config.json names none. EAGLE's code
    counts them one higher, by the layer that reads them. Meaningful from 7 layers on."""
    return 1, num_target_layers // 2 - 1, num_target_layers - 4


def eagle_layer(dims: Eagle3Dims) -> Layer[Part]:
    """The parts of the layer, whose attention reads rows [2·H]."""
    layer = decoder_layer(dims, 0, BODY)
    wide = {name: (rows, 2 * columns) for name, (rows, columns) in layer.qkv.shapes.items()}
    return replace(layer, qkv=Part(layer.qkv.name, wide))


def state_norm(dims: Eagle3Dims) -> Part:
    """The norm of the states that attention reads; that of embeddings is the layer's input norm."""
    return Part("state_norm", {STATE_NORM: (dims.hidden_size,)})


class Eagle3(TappedKind):
    name = "eagle3"
    title = "EAGLE-3 drafter"
    record = Eagle3Dims
    drafts = "levels"
    shifted_inputs = True
    dims: Eagle3Dims

    def stored(self, *, tied: bool) -> Iterator[Part]:
        layer = eagle_layer(self.dims)
        yield from (*self.own_tables, self.fc, state_norm(self.dims))
        yield from within_layer(0, layer.projected, layer.others)
        yield from (final_norm(self.dims, BODY), *self.to_target)

    def fitted(self, target: TransformerDims) -> Eagle3Dims:
        """A drafter whose config.json names no layers taps those that follow from the target's."""
        if self.tap_layers or target.num_layers <= 2 * TAPS:
            return self.dims
        return replace(self.dims, tap_layers=default_tap_layers(target.num_layers))

    def contradiction(self) -> str | None:
        d = self.dims
        if d.num_layers != 1:
            return f"num_layers is {d.num_layers}, an EAGLE-3 drafter has 1"
        if d.experts is not None:
            return "an EAGLE-3 drafter has no mixture of experts"
        if any(second <= first for first, second in pairwise(d.tap_layers)):
            return f"tap_layers {list(d.tap_layers)} do not rise"
        if problem := super().contradiction():
            return problem
        if d.draft_vocab_size is not None and not d.own_head:
            return f"draft_vocab_size is {d.draft_vocab_size}, but the head is the target's"
        return None

    def misfit(self, target: TransformerDims) -> str | None:
        d, width = self.dims, target.hidden_size
        found, name = d.target_hidden_size, "target_hidden_size"
        if found is None:
            found, name = d.hidden_size, "hidden_size"
        if problem := super().misfit(target) or differs(name, found, "the target's", width):
            return problem
        if not self.tap_layers:
            return f"it names no target layers to tap, and a target of {target.num_layers} layers has no usual ones"
        if problem := self.taps_outside(target):
            return problem
        for table, own in (("embedding", d.own_embedding), ("head", d.own_head)):
            if not own and d.hidden_size != width:
                return f"hidden_size is {d.hidden_size}, that of the target's {table}, which it uses, {width}"
        return None
