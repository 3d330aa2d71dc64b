"""z-lab's DFlash drafters, DFlash2, and JetSpec's with a causal block: most of their own is in `dflash_config`."""

from __future__ import annotations

from typing import Annotated, Any

from ddtree_trt.build.checkpoint.config_fields import refuse_other_values
from ddtree_trt.build.checkpoint.dialects.block import (
    FLAT,
    SCALES,
    SECTION,
    attention,
    block_drafter,
    flat_entries,
    known,
    scales,
)
from ddtree_trt.build.checkpoint.dialects.dialect import Dialect, required, stated, words
from ddtree_trt.models.decoder import LAYERS, TransformerDims
from ddtree_trt.models.drafters import dflash
from ddtree_trt.models.drafters.dflash import Convolution, DrafterDims, Selector, default_tap_layers
from ddtree_trt.models.families import Family
from ddtree_trt.reading import Fields

_VOCABULARIES = ("draft_vocab_size", "target_vocab_size")  # the target's, under any of these names


def _dims(fields: Fields, dims: TransformerDims, family: Family) -> DrafterDims:
    section = fields.section(dflash.SECTION)
    target_layers = required("num_target_layers", Annotated[int, LAYERS], fields, section)
    return _drafter(fields, dims, family, default_taps=default_tap_layers(target_layers, dims.num_layers))


def _dims2(fields: Fields, dims: TransformerDims, family: Family) -> DrafterDims:
    section = fields.section(dflash.SECTION)
    rank = Annotated[int, dflash.RANK]
    group = section.integer("conv_group_size", dflash.RANK)
    if dims.hidden_size % group:
        raise section.fault("conv_group_size", f"is {group}, but hidden_size {dims.hidden_size} is not a multiple")
    return _drafter(
        fields,
        dims,
        family,
        selector=Selector(top=section.value("selector_top_k", rank), rank=section.value("selector_rank", rank)),
        convolution=Convolution(
            taps=section.integer("conv_kernel_size", dflash.TAPS), groups=dims.hidden_size // group
        ),
    )


def _drafter(
    fields: Fields,
    dims: TransformerDims,
    family: Family,
    *,
    default_taps: tuple[int, ...] | None = None,
    **entries: Any,
) -> DrafterDims:
    section = fields.section(dflash.SECTION)
    for place in (fields, section):
        refuse_other_values(place, dict.fromkeys(_VOCABULARIES, (dims.vocab_size,)))
    return block_drafter(
        fields,
        dims,
        **attention(fields, section, family, dims.num_layers),
        **flat_entries(fields, section, default_taps),
        **scales(fields, section),
        anchor_first=stated("sample_from_anchor", bool, fields, section) or False,
        **entries,
    )


_NEUTRAL = {"projector_type": ("dflash",), "markov_rank": (0,)}

DFLASH = Dialect(
    title=f"drafters with a {dflash.SECTION}",
    architectures=(dflash.ARCHITECTURE,),
    fields=known(FLAT, SCALES, _VOCABULARIES, (dflash.SECTION,)),
    sections={dflash.SECTION: known(SECTION, SCALES, _VOCABULARIES, neutral=_NEUTRAL)},
    read_dims=_dims,
    unused=(dflash.OWN_EMBEDDING, dflash.OWN_HEAD),  # copies of the target's
)
DFLASH2 = Dialect(
    title="drafters with a candidate selector",
    architectures=("DFlash2DraftModel",),
    fields=DFLASH.fields,
    sections={
        dflash.SECTION: known(
            SECTION,
            SCALES,
            _VOCABULARIES,
            words("selector_top_k selector_rank conv_kernel_size conv_group_size"),
            neutral=_NEUTRAL,
        )
    },
    read_dims=_dims2,
    unused=DFLASH.unused,
)
