"""The DFlash drafter: its dimensions, and its tensors by their Hugging Face names.

A block of tokens is denoised in one pass. Keys and values of the context come from tapped target states, projected by
`fc` and normed; its layers are a decoder's, its embedding and head are the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ddtree_trt.models.decoder import (
    LAYERS,
    TOKEN,
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
ARCHITECTURE = "DFlashDraftModel"  # its class in config.json
SECTION = "dflash_config"  # its object in config.json
BODY = ""  # prefix of its layers and final norm
FC = "fc.weight"
CONTEXT_NORM = "hidden_norm.weight"


@dataclass(frozen=True)
class DrafterDims(TransformerDims):
    """A DFlash drafter: a block of `block_size` tokens is denoised in one pass over tapped target states."""

    block_size: Annotated[int, BLOCK]  # the bonus token and L = block_size − 1 masks
    mask_token_id: Annotated[int, TOKEN]
    tap_layers: tuple[Annotated[int, LAYER], ...]  # target layers whose output is tapped, M of them
    num_target_layers: Annotated[int, LAYERS]

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


def dflash_shapes(dims: DrafterDims) -> Shapes:
    """Every tensor of a DFlash drafter."""
    layers = (part for layer in drafter_layers(dims) for part in layer)
    return shapes_of((fc(dims), context_norm(dims), *layers, final_norm(dims, BODY)))


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
