"""What all dialects of block drafters state: the layers' windows and causality, taps, block and mask."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from ddtree_trt.build.checkpoint.dialects.dialect import Known, required, stated, words
from ddtree_trt.build.checkpoint.layer_types import LONGEST_WINDOW, sliding_layers
from ddtree_trt.models.decoder import LAYERS, TOKEN, TransformerDims
from ddtree_trt.models.drafters import dflash
from ddtree_trt.models.drafters.dflash import DrafterDims, dflash_contradiction
from ddtree_trt.models.families import Family
from ddtree_trt.reading import Between, Fields, shown

Layer = Annotated[int, dflash.LAYER]
MaskToken = Annotated[int, TOKEN]
BlockSize = Annotated[int, dflash.BLOCK]

# Of a drafter, wherever its dialect has them: what it was trained with, and the mask token's text.
BOOKKEEPING = words("mask_token num_anchors max_anchors loss_decay_gamma is_decoder")
CONFIDENCE = words("enable_confidence_head confidence_head_with_markov confidence_head_alpha")  # how sure a draft is
NEUTRAL = {
    "attention_mode": ("gqa",),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1,),
    "add_swa_attention_sink_bias": (False,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "use_aux_hidden_state": (True,),
}
SECTION = words(
    """target_layer_ids mask_token_id block_size num_target_layers sample_from_anchor is_causal causal causal_head
    use_swa swa_window_size"""
)
SCALES = words("input_embedding_scale output_multiplier final_logit_softcapping")
FLAT = words("target_layer_ids mask_token_id block_size num_target_layers sample_from_anchor is_causal")


def known(*names: Collection[str], neutral: dict[str, tuple[Any, ...]] | None = None) -> Known:
    """These fields and those that all block drafters may have."""
    return Known(BOOKKEEPING.union(*names), {**NEUTRAL, **(neutral or {})})


def taps(fields: Fields, name: str, layers: Sequence[int]) -> tuple[int, ...]:
    """The tapped layers that `name` lists, checked for their number."""
    if not layers or len(layers) > LAYERS.highest:
        raise fields.fault(name, f"has {len(layers)} entries, it must name the target layers to tap")
    return tuple(layers)


def block_drafter(
    fields: Fields, dims: TransformerDims, *, windows: Sequence[int], causal: Sequence[bool], **entries: Any
) -> DrafterDims:
    """The record of these entries. Windows and causality that no layer has are left out of it. Raises the fields'
    error for entries that contradict each other."""
    drafter = DrafterDims(
        **vars(dims),
        windows=tuple(windows) if any(windows) else (),
        causal=tuple(causal) if any(causal) else (),
        **entries,
    )
    if problem := dflash_contradiction(drafter):
        raise fields.source.fault(problem)
    return drafter


def flat_entries(fields: Fields, section: Fields, default_taps: Sequence[int] | None = None) -> dict[str, Any]:
    """Taps, block and mask where each may be in the section or beside it."""
    layers = stated("target_layer_ids", list[Layer], section, fields)
    if layers is None:
        layers = default_taps or required("target_layer_ids", list[Layer], section, fields)
    return {
        "block_size": required("block_size", BlockSize, fields, section),
        "mask_token_id": required("mask_token_id", MaskToken, section, fields),
        "tap_layers": taps(section, "target_layer_ids", layers),
        "num_target_layers": required("num_target_layers", Annotated[int, LAYERS], fields, section),
    }


def scales(fields: Fields, section: Fields) -> dict[str, Any]:
    """What the block's embeddings and the logits are multiplied by, and what the logits are capped at; 0 for no cap."""
    entries = {
        "embedding_scale": ("input_embedding_scale", dflash.SCALE, 1.0),
        "logit_scale": ("output_multiplier", dflash.SCALE, 1.0),
        "logit_cap": ("final_logit_softcapping", dflash.CAP, 0.0),
    }
    found = {
        name: stated(entry, Annotated[float, within], section, fields) for name, (entry, within, _) in entries.items()
    }
    return {name: entries[name][2] if value is None else value for name, value in found.items()}


def markov(*places: Fields) -> dict[str, Any]:
    """The Markov head: its rank, 0 for none, and whether the hidden state gates it."""
    kind = stated("markov_head_type", Literal["vanilla", "gated"], *places)
    rank = stated("markov_rank", Annotated[int, dflash.MARKOV_RANK], *places) or 0
    return {"markov_rank": rank, "markov_gated": bool(rank) and kind == "gated"}


def windows_of(fields: Fields, section: Fields, sliding: Sequence[bool]) -> list[int]:
    """Per layer the positions that a row sees, counting itself; 0 for all. Raises the fields' error for layers that
    slide without a size, and for two sizes."""
    if not any(sliding):
        return [0] * len(sliding)
    if fields.data.get("use_sliding_window") is False and not section.flag("use_swa", False):
        raise fields.fault("layer_types", "has 'sliding_attention', but use_sliding_window is false: which is it?")
    size = Annotated[int, Between(1, LONGEST_WINDOW)]
    sizes = (section.optional("swa_window_size", size), fields.optional("sliding_window", size))
    found = sorted({value for value in sizes if value is not None})
    if not found:
        raise fields.fault("sliding_window", "is missing, but layers have 'sliding_attention'")
    if len(found) > 1:
        problem = f"is {sizes[1]}, but swa_window_size is {sizes[0]}: which is it?"
        raise fields.fault("sliding_window", problem)
    return [found[0] if slides else 0 for slides in sliding]


def attention(fields: Fields, section: Fields, family: Family, layers: int) -> dict[str, Any]:
    """Windows and causality as vLLM reads them: causality is what is stated for the whole block, otherwise it is that
    of the layers listed with a window. `use_swa` gives every layer a window where none is listed with one."""
    listed = sliding_layers(fields, family, layers)
    everywhere = section.flag("use_swa", False) and not any(listed)
    windows = windows_of(fields, section, [True] * layers if everywhere else listed)
    given = {"is_causal": fields, "causal": section, "causal_head": section}
    values = {place.place(name): place.flag(name, False) for name, place in given.items() if place.has(name)}
    if len(set(values.values())) > 1:
        found = " and ".join(f"{name} is {shown(value)}" for name, value in values.items())
        raise fields.source.fault(f"{found}: which is it?")
    causal = [next(iter(values.values()))] * layers if values else listed
    return {"windows": windows, "causal": causal}


def tables_as_stored(dims: DrafterDims, stored: Collection[str]) -> DrafterDims:
    """The drafter with the embedding and the head that its checkpoint holds; without one it uses the target's. A head
    over fewer tokens than the target's cannot be left out."""
    own_head = dflash.OWN_HEAD in stored or dims.draft_vocab_size is not None
    return replace(dims, own_embedding=dflash.OWN_EMBEDDING in stored, own_head=own_head)
