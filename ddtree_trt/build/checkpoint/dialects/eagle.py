"""EAGLE-3 drafters: of EAGLE's authors and SpecForge, of the library `speculators`, and of DeepSpec.

They name the tapped layers in two ways: by the layer whose output is read, or, as vLLM and EAGLE's own code count, by
the one that reads it, one higher. Which it is follows from the field. Where there is none, the layers follow from the
target's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any

from ddtree_trt.build.checkpoint.dialects.dialect import Dialect, Known, words
from ddtree_trt.build.checkpoint.layer_types import refuse_windows
from ddtree_trt.models.decoder import LAYERS, VOCABULARY, WIDTH, TransformerDims
from ddtree_trt.models.drafters import eagle3
from ddtree_trt.models.drafters.dflash import LAYER
from ddtree_trt.models.drafters.eagle3 import Eagle3Dims, eagle3_contradiction
from ddtree_trt.models.families import FAMILIES, Family
from ddtree_trt.reading import Between, Fields

ARCHITECTURE = "LlamaForCausalLMEagle3"  # the class of SpecForge's; EAGLE's authors write the decoder's
DRAFT_VOCABULARY = "draft_vocab_size"  # what sets theirs apart
SPECULATORS = "eagle3"  # the type in speculators' layout
_SECTION = "eagle_config"
_OUTPUTS = "eagle_aux_hidden_state_layer_ids"  # layers whose output is read within `_SECTION`; beside it one higher
_DEEPSPEC_TAPS = "target_layer_ids"
_MIDLAYER = {"midlayer.": "layers.0."}
_UNUSED = ("t2d", "verifier_norm.", "verifier_lm_head.")  # the map back, and copies of the target's tensors
_COMMON = words("draft_vocab_size target_hidden_size norm_before_residual norm_output")
# Norms before and after `fc`, and heads that draft several tokens at once.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "norm_before_fc": (False,),
    "fc_norm": (False,),
    "use_aux_hidden_state": (True,),
    "parallel_drafting": (False,),
    "enable_sp_ulysses": (False,),
    "tie_word_embeddings": (False,),
    "is_causal": (True,),
    "is_decoder": (True, False),
}
_LayerIds = list[Annotated[int, LAYER]]
_ReaderIds = list[Annotated[int, Between(1, LAYERS.highest)]]


def _drafter(fields: Fields, dims: TransformerDims, taps: Collection[int], **entries: Any) -> Eagle3Dims:
    """The record of these entries and of the fields that all dialects have. Raises the fields' error for entries that
    contradict each other."""
    vocabulary = fields.optional(DRAFT_VOCABULARY, Annotated[int, VOCABULARY])
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
    if problem := eagle3_contradiction(drafter):
        raise fields.source.fault(problem)
    return drafter


def _eagle_dims(fields: Fields, dims: TransformerDims, family: Family) -> Eagle3Dims:
    refuse_windows(fields, family, dims.num_layers)
    taps = fields.section(_SECTION).optional(_OUTPUTS, _LayerIds) or [
        layer - 1 for layer in fields.optional(_OUTPUTS, _ReaderIds) or ()
    ]
    return _drafter(fields, dims, taps, norm_before_residual=fields.flag("norm_before_residual", False))


def _speculators_dims(fields: Fields, dims: TransformerDims, family: Family) -> Eagle3Dims:
    refuse_windows(fields.section("transformer_layer_config"), family, dims.num_layers)
    taps = [layer - 1 for layer in fields.optional(_OUTPUTS, _ReaderIds) or ()]
    # The library and vLLM differ in what a file means that does not say it.
    stated = fields.value("norm_before_residual", bool)
    return _drafter(fields, dims, taps, norm_before_residual=stated, own_embedding=True)


def _deepspec_dims(fields: Fields, dims: TransformerDims, family: Family) -> Eagle3Dims:
    refuse_windows(fields, family, dims.num_layers)
    return _drafter(fields, dims, fields.value(_DEEPSPEC_TAPS, _LayerIds), own_embedding=True)


def _as_stored(dims: Eagle3Dims, stored: Collection[str]) -> Eagle3Dims:
    """The drafter with the embedding and the head that its checkpoint holds; without one it uses the target's. A head
    over fewer tokens than the target's cannot be left out."""
    own_head = eagle3.HEAD in stored or dims.draft_vocab_size is not None
    return replace(dims, own_embedding=eagle3.EMBEDDING in stored, own_head=own_head)


def _dialect(
    title: str,
    architectures: tuple[str, ...],
    read: frozenset[str],
    read_dims: Any,
    *,
    sections: Mapping[str, Known] | None = None,
    decoder: str | None = None,
) -> Dialect:
    return Dialect(
        title=title,
        architectures=architectures,
        fields=Known(_COMMON | read, _NEUTRAL),
        read_dims=read_dims,
        sections=sections or {},
        decoder=decoder,
        settle=_as_stored,
        unused=_UNUSED,
        renamed=_MIDLAYER,
    )


EAGLE = _dialect(
    "EAGLE-3 drafters",
    (ARCHITECTURE, *(family.architecture for family in FAMILIES.values())),
    words(f"{_SECTION} {_OUTPUTS}"),
    _eagle_dims,
    sections={_SECTION: Known(words(_OUTPUTS), _NEUTRAL)},
)
EAGLE_SPECULATORS = _dialect(
    "EAGLE-3 drafters of speculators",
    (),
    words(
        f"""speculators_model_type speculators_version speculators_config transformer_layer_config architectures
        model_type auto_map embed_requires_grad has_no_defaults_at_init base_model_ep_plan {_OUTPUTS}"""
    ),
    _speculators_dims,
    sections={
        "speculators_config": Known(words("algorithm default_proposal_method proposal_methods verifier")),
        "transformer_layer_config": Known(),
    },
    decoder="transformer_layer_config",
)
EAGLE_DEEPSPEC = _dialect(
    "DeepSpec's EAGLE-3 drafters",
    ("Qwen3Eagle3Model",),
    words(
        f"""{_DEEPSPEC_TAPS} num_target_layers ttt_length step_loss_decay draft_num_hidden_layers
        target_model_name_or_path"""
    ),
    _deepspec_dims,
)
