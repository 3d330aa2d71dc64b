"""How publishers state EAGLE-3 drafters: EAGLE's authors and SpecForge, the library `speculators`, and DeepSpec.

They name the tapped layers in two ways: by the layer whose output is read, or, as vLLM and EAGLE's own code count, by
the one that reads it, one higher. Which it is follows from the field. Where there is none, the layers follow from the
target's.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from ddtree_trt.build.checkpoint.dialect import (
    SPECULATORS_DECODER,
    SPECULATORS_TYPE,
    Dialect,
    Known,
    refuse_windows,
    words,
)
from ddtree_trt.drafters.eagle3.dims import Eagle3, Eagle3Dims
from ddtree_trt.drafters.tapped import TapLayer
from ddtree_trt.models.decoder import LAYERS, VOCABULARY, WIDTH, TransformerDims
from ddtree_trt.models.families import FAMILIES, Family
from ddtree_trt.reading import Between, Fields

_CLASS = "LlamaForCausalLMEagle3"  # SpecForge's; EAGLE's authors write the decoder's
_DRAFT_VOCABULARY = "draft_vocab_size"  # what sets theirs apart
_SECTION = "eagle_config"
_OUTPUTS = "eagle_aux_hidden_state_layer_ids"  # layers whose output is read within `_SECTION`; beside it one higher
_DEEPSPEC_TAPS = "target_layer_ids"
_COMMON = words(f"{_DRAFT_VOCABULARY} target_hidden_size norm_before_residual norm_output")
# Norms before and after `fc`, and heads that draft several tokens at once.
_NEUTRAL: Known = {
    "norm_before_fc": (False,),
    "fc_norm": (False,),
    "use_aux_hidden_state": (True,),
    "parallel_drafting": (False,),
    "enable_sp_ulysses": (False,),
    "tie_word_embeddings": (False,),
    "is_causal": (True,),
    "is_decoder": (True, False),
}


def _drafter(fields: Fields, dims: TransformerDims, taps: Collection[int], **entries: Any) -> Eagle3Dims:
    """The record of these entries and of the fields of all dialects. Raises the fields' error for contradictions."""
    vocabulary = fields.optional(_DRAFT_VOCABULARY, Annotated[int, VOCABULARY])
    width = fields.optional("target_hidden_size", Annotated[int, WIDTH])
    another_width = width not in (None, dims.hidden_size)
    drafter = Eagle3Dims(
        **vars(dims),
        tap_layers=tuple(taps),
        target_hidden_size=width if another_width else None,
        draft_vocab_size=None if vocabulary == dims.vocab_size else vocabulary,
        norm_output=fields.flag("norm_output", False),
        **{"own_embedding": another_width, **entries},  # until the tensors are known
    )
    if problem := Eagle3(drafter).contradiction():
        raise fields.source.fault(problem)
    return drafter


def _published_dims(fields: Fields, dims: TransformerDims, family: Family) -> Eagle3Dims:
    """Of EAGLE's authors, SpecForge and speculators."""
    library = fields.has(SPECULATORS_TYPE)
    refuse_windows(fields.section(SPECULATORS_DECODER) if library else fields, family, dims.num_layers)
    readers = fields.optional(_OUTPUTS, list[Annotated[int, Between(1, LAYERS.highest)]]) or ()
    taps = fields.section(_SECTION).optional(_OUTPUTS, list[TapLayer]) or [layer - 1 for layer in readers]
    if library:  # it and vLLM differ in what a file means that does not say it
        stated = fields.value("norm_before_residual", bool)
        return _drafter(fields, dims, taps, norm_before_residual=stated, own_embedding=True)
    return _drafter(fields, dims, taps, norm_before_residual=fields.flag("norm_before_residual", False))


def _deepspec_dims(fields: Fields, dims: TransformerDims, family: Family) -> Eagle3Dims:
    refuse_windows(fields, family, dims.num_layers)
    return _drafter(fields, dims, fields.value(_DEEPSPEC_TAPS, list[TapLayer]), own_embedding=True)


def _dialect(title: str, read_dims: Any, read: str, sections: Mapping[str, Known], **fields: Any) -> Dialect:
    return Dialect(
        title=title,
        fields={**_NEUTRAL, **_COMMON, **words(read)},
        read_dims=read_dims,
        sections=sections,
        settle=Eagle3Dims.as_stored,
        unused=("t2d", "verifier_norm.", "verifier_lm_head."),  # the map back, and copies of the target's tensors
        renamed={"midlayer.": "layers.0."},
        **fields,
    )


DIALECTS = (
    _dialect(
        "EAGLE-3 drafters",
        _published_dims,
        f"{_SECTION} {_OUTPUTS}",
        {_SECTION: {**_NEUTRAL, **words(_OUTPUTS)}},
        architectures=(_CLASS, *(family.architecture for family in FAMILIES.values())),
        mark=_DRAFT_VOCABULARY,
    ),
    _dialect(
        "EAGLE-3 drafters of speculators",
        _published_dims,
        f"""{SPECULATORS_TYPE} {SPECULATORS_DECODER} {_OUTPUTS} speculators_version speculators_config architectures
        model_type auto_map embed_requires_grad has_no_defaults_at_init base_model_ep_plan""",
        {
            "speculators_config": words("algorithm default_proposal_method proposal_methods verifier"),
            SPECULATORS_DECODER: {},
        },
        speculators="eagle3",
    ),
    _dialect(
        "DeepSpec's EAGLE-3 drafters",
        _deepspec_dims,
        f"""{_DEEPSPEC_TAPS} num_target_layers ttt_length step_loss_decay draft_num_hidden_layers
        target_model_name_or_path""",
        {},
        architectures=("Qwen3Eagle3Model",),
    ),
)
