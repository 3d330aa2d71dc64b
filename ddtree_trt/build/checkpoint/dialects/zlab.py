"""z-lab's DFlash drafters, DFlash2, and JetSpec's with a causal block: most of their own is in `dflash_config`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
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
from ddtree_trt.models.decoder import LAYERS, VOCABULARY, TransformerDims
from ddtree_trt.models.drafters import dflash
from ddtree_trt.models.drafters.dflash import Convolution, DrafterDims, Selector, default_tap_layers
from ddtree_trt.models.families import Family
from ddtree_trt.reading import Fields

_DRAFT_VOCABULARY = "draft_vocab_size"  # smaller than the target's where there is a d2t
_TARGET_VOCABULARY = "target_vocab_size"
_VOCABULARIES = (_DRAFT_VOCABULARY, _TARGET_VOCABULARY)


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
        refuse_other_values(place, {_TARGET_VOCABULARY: (dims.vocab_size,)})
    vocabulary = stated(_DRAFT_VOCABULARY, Annotated[int, VOCABULARY], fields, section)
    return block_drafter(
        fields,
        dims,
        **attention(fields, section, family, dims.num_layers),
        **flat_entries(fields, section, default_taps),
        **scales(fields, section),
        anchor_first=stated("sample_from_anchor", bool, fields, section) or False,
        draft_vocab_size=None if vocabulary == dims.vocab_size else vocabulary,
        **entries,
    )


def _head_as_stored(dims: DrafterDims, stored: Collection[str]) -> DrafterDims:
    """A head over fewer tokens is the drafter's own where its checkpoint holds one, and else rows of the target's."""
    return replace(dims, own_head=True) if dims.draft_vocab_size is not None and dflash.OWN_HEAD in stored else dims


_NEUTRAL = {"projector_type": ("dflash",), "markov_rank": (0,)}

DFLASH = Dialect(
    title=f"drafters with a {dflash.SECTION}",
    architectures=(dflash.ARCHITECTURE,),
    fields=known(FLAT, SCALES, _VOCABULARIES, (dflash.SECTION,)),
    sections={dflash.SECTION: known(SECTION, SCALES, _VOCABULARIES, neutral=_NEUTRAL)},
    read_dims=_dims,
    settle=_head_as_stored,
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
    settle=_head_as_stored,
    unused=DFLASH.unused,
)
