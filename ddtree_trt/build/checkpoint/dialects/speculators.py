"""The layout of the library `speculators`: the decoder in `transformer_layer_config`, the algorithm's fields beside it.

Its layer ids count the embedding's output as 0, so that each is one more than the layer whose output it means. The
number of the target's layers is not stated.
"""

from __future__ import annotations

from typing import Annotated, Any

from ddtree_trt.build.checkpoint.config_fields import refuse_other_values
from ddtree_trt.build.checkpoint.dialects.block import (
    CONFIDENCE,
    MaskToken,
    block_drafter,
    known,
    markov,
    tables_as_stored,
    taps,
    windows_of,
)
from ddtree_trt.build.checkpoint.dialects.deepspec import CONFIDENCE_HEAD, MARKOV
from ddtree_trt.build.checkpoint.dialects.dialect import Dialect, Known, stated, words
from ddtree_trt.build.checkpoint.dialects.eagle import EAGLE_SPECULATORS, SPECULATORS
from ddtree_trt.build.checkpoint.layer_types import sliding_layers
from ddtree_trt.models.decoder import LAYERS, VOCABULARY, TransformerDims
from ddtree_trt.models.drafters import dflash
from ddtree_trt.models.drafters.dflash import DrafterDims
from ddtree_trt.models.families import Family
from ddtree_trt.reading import Between, Fields, shown

TYPE = "speculators_model_type"
DECODER = "transformer_layer_config"
_CONFIG = "speculators_config"
_TAPS = "aux_hidden_state_layer_ids"
_WINDOW_FIELDS = words("layer_types use_sliding_window sliding_window max_window_layers")
_READ = words(
    """speculators_model_type speculators_version draft_vocab_size target_hidden_size sliding_window_non_causal
    sample_from_anchor block_size mask_token_id aux_hidden_state_layer_ids architectures model_type auto_map
    embed_requires_grad"""
) | {DECODER, _CONFIG}
# Stated for whoever serves it: its target, and how many tokens to propose.
_PROPOSALS = Known(words("algorithm default_proposal_method proposal_methods verifier"))


def _dims(fields: Fields, dims: TransformerDims, family: Family) -> DrafterDims:
    decoder = fields.section(DECODER)
    refuse_other_values(fields, {"target_hidden_size": (dims.hidden_size,)})
    for name in _WINDOW_FIELDS:
        stated(name, Any, decoder, fields)  # refused where the two differ
    merged = Fields({**{n: v for n, v in fields.data.items() if n in _WINDOW_FIELDS}, **decoder.data}, fields.source)
    sliding = sliding_layers(merged, family, dims.num_layers)
    non_causal = fields.flag("sliding_window_non_causal", False)
    block = fields.integer("block_size", dflash.BLOCK)
    vocabulary = fields.optional("draft_vocab_size", Annotated[int, VOCABULARY])
    return block_drafter(
        fields,
        dims,
        windows=windows_of(merged, fields, sliding),
        causal=[slides and not non_causal for slides in sliding],
        block_size=block,
        mask_token_id=fields.value("mask_token_id", MaskToken),
        tap_layers=_tap_layers(fields),
        num_target_layers=None,
        anchor_first=_anchor_first(fields, block),
        draft_vocab_size=None if vocabulary == dims.vocab_size else vocabulary,
        own_embedding=True,
        own_head=True,
        **markov(fields),
    )


def _tap_layers(fields: Fields) -> tuple[int, ...]:
    """The tapped layers, each one less than its id."""
    ids = fields.value(_TAPS, list[Annotated[int, Between(1, LAYERS.highest)]])
    return taps(fields, _TAPS, [i - 1 for i in ids])


def _anchor_first(fields: Fields, block: int) -> bool:
    """Whether position 0 predicts: as stated, or as the proposals are as many as the block has positions."""
    methods = fields.section(_CONFIG).optional("proposal_methods", list[dict[str, Any]]) or [{}]
    proposed = max(Fields(m, fields.source, _CONFIG).integer("speculative_tokens", dflash.BLOCK, 1) for m in methods)
    given = fields.optional("sample_from_anchor", bool)
    anchor_first = proposed == block if given is None else given
    longest = block if anchor_first else block - 1
    if proposed > longest:
        stated_as = "" if given is None else f" and sample_from_anchor {shown(given)}"
        problem = f"proposes {proposed} tokens, more than block_size {block}{stated_as} can: which is it?"
        raise fields.fault(_CONFIG, problem)
    return anchor_first


def _dialect(kind: str, *more: frozenset[str], neutral: dict[str, tuple[Any, ...]] | None = None) -> Dialect:
    return Dialect(
        title=f"{kind} drafters of speculators",
        architectures=(),
        fields=known(_READ, _WINDOW_FIELDS, *more, neutral=neutral),
        sections={_CONFIG: _PROPOSALS, DECODER: Known(words("architectures"))},
        decoder=DECODER,
        read_dims=_dims,
        settle=tables_as_stored,
        # The vocabulary's map the other way, and copies of the target's that only training needs.
        unused=("t2d", "verifier_lm_head.", "verifier_norm.", CONFIDENCE_HEAD),
    )


_NEUTRAL = {"tie_word_embeddings": (False,)}
_DIALECTS = {
    "dflash": _dialect("DFlash", neutral=_NEUTRAL),
    "dspark": _dialect("DSpark", MARKOV, CONFIDENCE, neutral=_NEUTRAL),
    SPECULATORS: EAGLE_SPECULATORS,
}


def speculators_dialect(fields: Fields) -> Dialect:
    """The dialect of a file that names its type. Raises the fields' error for a type that is not implemented."""
    kind = fields.text(TYPE)
    if kind not in _DIALECTS:
        raise fields.fault(TYPE, f"is {shown(kind)}, which is not implemented; {' and '.join(_DIALECTS)} are")
    return _DIALECTS[kind]
