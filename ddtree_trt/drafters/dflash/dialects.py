"""How publishers state block drafters in config.json.

z-lab's DFlash, DFlash2 and JetSpec have most of their own in `dflash_config`. DeepSpec writes all fields beside those
of the decoder and brings an embedding and a head; SpecForge's DSpark has a `dflash_config` and uses the target's: in
both, position 0 of the block predicts too, and a Markov head may follow. The library `speculators` has the decoder in
an object of its own; its layer ids are one more than the layer whose output they mean.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from ddtree_trt.build.checkpoint.dialect import (
    LONGEST_WINDOW,
    SPECULATORS_DECODER,
    SPECULATORS_TYPE,
    Dialect,
    Known,
    known,
    refuse_unknown,
    required,
    sliding_layers,
    stated,
    words,
)
from ddtree_trt.drafters.dflash import dims as dflash
from ddtree_trt.drafters.dflash.dims import SECTION, DFlash, DFlashDims, default_tap_layers
from ddtree_trt.drafters.dflash.heads import RANK, TAPS, Convolution, Selector
from ddtree_trt.drafters.tapped import OWN_EMBEDDING, OWN_HEAD, TapLayer
from ddtree_trt.models.decoder import LAYERS, TOKEN, VOCABULARY, TransformerDims
from ddtree_trt.models.families import Family
from ddtree_trt.reading import Between, Fields, shown

_MaskToken = Annotated[int, TOKEN]
_Vocabulary = Annotated[int, VOCABULARY]

# Of a drafter, wherever its dialect has them: what it was trained with, and the mask token's text.
_COMMON: Known = {
    **words("mask_token num_anchors max_anchors loss_decay_gamma is_decoder"),
    "attention_mode": ("gqa",),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1,),
    "add_swa_attention_sink_bias": (False,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "use_aux_hidden_state": (True,),
}
_FLAT = words("target_layer_ids mask_token_id block_size num_target_layers sample_from_anchor is_causal")
_IN_SECTION = _FLAT | words("causal causal_head use_swa swa_window_size")
_SCALES = words("input_embedding_scale output_multiplier final_logit_softcapping")
_MARKOV = words("markov_rank markov_head_type")
_CONFIDENCE = words("enable_confidence_head confidence_head_with_markov confidence_head_alpha")  # how sure a draft is
_CONFIDENCE_HEAD = "confidence_head."  # decides how much of a draft is proposed; here the budget does
_VOCABULARIES = words("draft_vocab_size target_vocab_size")  # the first is smaller where there is a d2t
_UNTIED = {"tie_word_embeddings": (False,)}


def _drafter(
    fields: Fields, dims: TransformerDims, *, windows: Sequence[int], causal: Sequence[bool], **entries: Any
) -> DFlashDims:
    """The record of these entries. Raises the fields' error for entries that contradict each other."""
    vocabulary = entries.pop("draft_vocab_size", None)
    drafter = DFlashDims(
        **vars(dims),
        windows=tuple(windows) if any(windows) else (),
        causal=tuple(causal) if any(causal) else (),
        draft_vocab_size=None if vocabulary == dims.vocab_size else vocabulary,
        **entries,
    )
    if problem := DFlash(drafter).contradiction():
        raise fields.source.fault(problem)
    return drafter


def _taps(fields: Fields, name: str, layers: Sequence[int]) -> tuple[int, ...]:
    """The tapped layers that `name` lists, checked for their number."""
    if not layers or len(layers) > LAYERS.highest:
        raise fields.fault(name, f"has {len(layers)} entries, it must name the target layers to tap")
    return tuple(layers)


def _markov(*places: Fields) -> dict[str, Any]:
    """The Markov head: its rank, 0 for none, and whether the hidden state gates it."""
    kind = stated("markov_head_type", Literal["vanilla", "gated"], *places)
    rank = stated("markov_rank", Annotated[int, dflash.MARKOV_RANK], *places) or 0
    return {"markov_rank": rank, "markov_gated": bool(rank) and kind == "gated"}


def _windows(fields: Fields, section: Fields, sliding: Sequence[bool]) -> list[int]:
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
        raise fields.fault("sliding_window", f"is {sizes[1]}, but swa_window_size is {sizes[0]}: which is it?")
    return [found[0] if slides else 0 for slides in sliding]


def _attention(fields: Fields, section: Fields, family: Family, layers: int) -> dict[str, Any]:
    """Windows and causality as vLLM reads them: causality is what is stated for the whole block, otherwise it is that
    of the layers listed with a window. `use_swa` gives every layer a window where none is listed with one."""
    listed = sliding_layers(fields, family, layers)
    everywhere = section.flag("use_swa", False) and not any(listed)
    windows = _windows(fields, section, [True] * layers if everywhere else listed)
    given = {"is_causal": fields, "causal": section, "causal_head": section}
    values = {place.place(name): place.flag(name, False) for name, place in given.items() if place.has(name)}
    if len(set(values.values())) > 1:
        found = " and ".join(f"{name} is {shown(value)}" for name, value in values.items())
        raise fields.source.fault(f"{found}: which is it?")
    causal = [next(iter(values.values()))] * layers if values else listed
    return {"windows": windows, "causal": causal}


# z-lab and JetSpec, DeepSpec and SpecForge: where each field may be in the section or beside it


def _flat_dims(
    fields: Fields,
    dims: TransformerDims,
    family: Family,
    *,
    spread: bool = False,
    anchor_first: bool = False,
    own_tables: bool = False,
    **entries: Any,
) -> DFlashDims:
    """`spread`: taps that are not stated are spread over the target's layers. `anchor_first`: if it is not stated."""
    section = fields.section(SECTION)
    for place in (fields, section):
        refuse_unknown(place, {**dict.fromkeys(place.data), "target_vocab_size": (dims.vocab_size,)})
    target_layers = required("num_target_layers", Annotated[int, LAYERS], fields, section)
    taps = stated("target_layer_ids", list[TapLayer], section, fields)
    if taps is None:
        default = default_tap_layers(target_layers, dims.num_layers)
        taps = default if spread else section.value("target_layer_ids", list[TapLayer])
    anchor = stated("sample_from_anchor", bool, fields, section)
    scales = {
        "embedding_scale": ("input_embedding_scale", dflash.SCALE),
        "logit_scale": ("output_multiplier", dflash.SCALE),
        "logit_cap": ("final_logit_softcapping", dflash.CAP),
    }
    found = {ours: stated(name, Annotated[float, within], section, fields) for ours, (name, within) in scales.items()}
    return _drafter(
        fields,
        dims,
        **_attention(fields, section, family, dims.num_layers),
        block_size=required("block_size", Annotated[int, dflash.BLOCK], fields, section),
        mask_token_id=required("mask_token_id", _MaskToken, section, fields),
        tap_layers=_taps(section, "target_layer_ids", taps),
        num_target_layers=target_layers,
        **{ours: value for ours, value in found.items() if value is not None},
        anchor_first=anchor_first if anchor is None else anchor,
        draft_vocab_size=stated("draft_vocab_size", _Vocabulary, fields, section),
        own_embedding=own_tables,
        own_head=own_tables,
        **_markov(fields, section),
        **entries,
    )


def _dflash2_dims(fields: Fields, dims: TransformerDims, family: Family) -> DFlashDims:
    section = fields.section(SECTION)
    group = section.integer("conv_group_size", RANK)
    if dims.hidden_size % group:
        raise section.fault("conv_group_size", f"is {group}, but hidden_size {dims.hidden_size} is not a multiple")
    selector = Selector(section.integer("selector_top_k", RANK), section.integer("selector_rank", RANK))
    convolution = Convolution(section.integer("conv_kernel_size", TAPS), groups=dims.hidden_size // group)
    return _flat_dims(fields, dims, family, selector=selector, convolution=convolution)


def _zlab(title: str, read_dims: Any, architecture: str, *more: Known, mark: str = "") -> Dialect:
    neutral = {"projector_type": ("dflash",), "markov_rank": (0,)}

    def settle(dims: DFlashDims, stored: Collection[str]) -> DFlashDims:
        """Of a head over fewer tokens: whether the checkpoint holds one, or it is rows of the target's."""
        return replace(dims, own_head=True) if dims.draft_vocab_size is not None and OWN_HEAD in stored else dims

    return Dialect(
        title=title,
        architectures=(architecture,),
        mark=mark,
        fields=known(_COMMON, _FLAT, _SCALES, _VOCABULARIES, {SECTION: None}),
        sections={SECTION: known(_COMMON, _IN_SECTION, _SCALES, _VOCABULARIES, *more, neutral)},
        read_dims=read_dims,
        settle=settle,
        unused=(OWN_EMBEDDING, OWN_HEAD),  # copies of the target's
    )


def _dspark(title: str, architecture: str, *, own_tables: bool) -> Dialect:
    neutral = {"projector_type": ("dspark",), **_UNTIED}
    return Dialect(
        title=title,
        architectures=(architecture,),
        fields=known(_COMMON, _FLAT, _MARKOV, _CONFIDENCE, _VOCABULARIES, {SECTION: None}, neutral),
        sections={SECTION: known(_COMMON, _IN_SECTION, _MARKOV, _CONFIDENCE, _VOCABULARIES, neutral)},
        read_dims=partial(_flat_dims, anchor_first=True, own_tables=own_tables),
        settle=lambda dims, stored: replace(dims, own_embedding=OWN_EMBEDDING in stored, own_head=OWN_HEAD in stored),
        unused=(_CONFIDENCE_HEAD,),
    )


# speculators

_CONFIG = "speculators_config"
_AUX_TAPS = "aux_hidden_state_layer_ids"
_WINDOW_FIELDS = words("layer_types use_sliding_window sliding_window max_window_layers")
_SPECULATORS = words(
    f"""{SPECULATORS_TYPE} {SPECULATORS_DECODER} {_CONFIG} {_AUX_TAPS} speculators_version draft_vocab_size
    target_hidden_size sliding_window_non_causal sample_from_anchor block_size mask_token_id architectures model_type
    auto_map embed_requires_grad"""
)


def _speculators_dims(fields: Fields, dims: TransformerDims, family: Family) -> DFlashDims:
    decoder = fields.section(SPECULATORS_DECODER)
    refuse_unknown(fields, {**dict.fromkeys(fields.data), "target_hidden_size": (dims.hidden_size,)})
    for name in _WINDOW_FIELDS:
        stated(name, Any, decoder, fields)  # refused where the two differ
    merged = Fields({**{n: v for n, v in fields.data.items() if n in _WINDOW_FIELDS}, **decoder.data}, fields.source)
    sliding = sliding_layers(merged, family, dims.num_layers)
    non_causal = fields.flag("sliding_window_non_causal", False)
    block = fields.integer("block_size", dflash.BLOCK)
    ids = fields.value(_AUX_TAPS, list[Annotated[int, Between(1, LAYERS.highest)]])
    # Whether position 0 predicts: as stated, or as the proposals are as many as the block has positions.
    methods = fields.section(_CONFIG).optional("proposal_methods", list[dict[str, Any]]) or [{}]
    proposed = max(Fields(m, fields.source, _CONFIG).integer("speculative_tokens", dflash.BLOCK, 1) for m in methods)
    anchor_first = fields.flag("sample_from_anchor", proposed == block)
    if proposed > (block if anchor_first else block - 1):
        also = f" and sample_from_anchor {shown(anchor_first)}" if fields.has("sample_from_anchor") else ""
        raise fields.fault(_CONFIG, f"proposes {proposed} tokens, more than block_size {block}{also} can: which is it?")
    return _drafter(
        fields,
        dims,
        windows=_windows(merged, fields, sliding),
        causal=[slides and not non_causal for slides in sliding],
        block_size=block,
        mask_token_id=fields.value("mask_token_id", _MaskToken),
        tap_layers=_taps(fields, _AUX_TAPS, [i - 1 for i in ids]),
        num_target_layers=None,
        anchor_first=anchor_first,
        draft_vocab_size=fields.optional("draft_vocab_size", _Vocabulary),
        own_embedding=True,
        own_head=True,
        **_markov(fields),
    )


def _speculators(kind: str, title: str, *more: Known) -> Dialect:
    return Dialect(
        title=f"{title} drafters of speculators",
        speculators=kind,
        fields=known(_COMMON, _SPECULATORS, _WINDOW_FIELDS, *more, _UNTIED),
        # Stated for whoever serves it: its target, and how many tokens to propose.
        sections={
            _CONFIG: words("algorithm default_proposal_method proposal_methods verifier"),
            SPECULATORS_DECODER: words("architectures"),
        },
        read_dims=_speculators_dims,
        settle=DFlashDims.as_stored,
        # The vocabulary's map the other way, and copies of the target's that only training needs.
        unused=("t2d", "verifier_lm_head.", "verifier_norm.", _CONFIDENCE_HEAD),
    )


_SELECTOR = words("selector_top_k selector_rank conv_kernel_size conv_group_size")
DIALECTS = (
    _zlab(f"drafters with a {SECTION}", partial(_flat_dims, spread=True), dflash.ARCHITECTURE, mark=SECTION),
    _zlab("drafters with a candidate selector", _dflash2_dims, "DFlash2DraftModel", _SELECTOR),
    _dspark("DeepSpec's drafters", "Qwen3DSparkModel", own_tables=True),
    _dspark("DSpark drafters", "DSparkDraftModel", own_tables=False),
    _speculators("dflash", "DFlash"),
    _speculators("dspark", "DSpark", _MARKOV, _CONFIDENCE),
)
