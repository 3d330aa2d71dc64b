"""The fields of config.json that are known; every other one is refused by its name.

Three kinds: fields that `config` reads, bookkeeping that no number of the model depends on, and fields of which only
the values that change nothing are implemented. A field that is null is not set. Names are those of the families'
configurations in transformers, of their base class through all versions, and of published DFlash-like drafters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ddtree_trt.errors import DDTreeError
from ddtree_trt.models.drafters import dflash
from ddtree_trt.models.families import CONFIG_NAMES, EXPERT_NAMES, Family
from ddtree_trt.reading import Fields, shown

_READ = frozenset(CONFIG_NAMES.values()) | frozenset(
    """architectures model_type rope_parameters rope_scaling tie_word_embeddings eos_token_id layer_types
    use_sliding_window sliding_window max_window_layers quantization_config""".split()
)
_READ_OF_EXPERTS = frozenset(("num_local_experts", *EXPERT_NAMES.values()))
_READ_OF_DFLASH = frozenset(("block_size", "num_target_layers", dflash.SECTION))
_READ_OF_SECTION = frozenset("target_layer_ids mask_token_id block_size".split())

_BOOKKEEPING = frozenset(
    """_name_or_path name_or_path _commit_hash attn_implementation _flash_attn_2_enabled
    _attn_implementation _attn_implementation_internal _attn_implementation_autoset
    _experts_implementation router_aux_loss_coef
    auto_map transformers_version transformers_weights torch_dtype dtype model_name
    unsloth_fixed unsloth_version is_llama_config transformers.js_config pretraining_tp use_cache use_bfloat16
    initializer_range attention_dropout hidden_dropout resid_dropout embd_dropout dropout
    bos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id
    tokenizer_class model_max_length prefix num_labels id2label label2id problem_type finetuning_task
    task_specific_params
    return_dict return_dict_in_generate output_scores output_attentions output_hidden_states torchscript tf_legacy_loss
    chunk_size_feed_forward gradient_checkpointing use_return_dict keys_to_ignore_at_inference
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens""".split()
)
# Of drafters: what they were trained with, and the mask token's text beside its id.
_BOOKKEEPING_OF_SECTION = frozenset("mask_token num_anchors loss_decay_gamma".split())

# Field → the values that change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "pruned_heads": ({},),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "cross_attention_hidden_size": (),
    "attention_sink_bias": (False,),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "output_multiplier": (1,),
    "logit_scale": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "mlp_only_layers": ([],),
    "output_router_logits": (False,),
    "norm_topk_prob": (False,),
    "use_mrope": (False,),
}
_NEUTRAL_OF_LANGUAGE_MODELS = {"is_causal": (True,), "is_decoder": (True, False)}
_NEUTRAL_OF_DFLASH: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (False,),
    "is_decoder": (True, False),
    "sample_from_anchor": (False,),
}
_NEUTRAL_OF_SECTION: Mapping[str, tuple[Any, ...]] = {
    "causal": (False,),
    "is_causal": (False,),
    "causal_head": (False,),
    "sample_from_anchor": (False,),
    "attention_mode": ("gqa",),
    "attention_sink_bias": (False,),
    "use_swa": (False,),
    "use_sliding_window": (False,),
    "final_logit_softcapping": (),
    "output_multiplier": (1,),
    "projector_type": (),
    "markov_rank": (0,),
}


def refuse_unknown_fields(fields: Fields, family: Family, *, is_dflash: bool) -> None:
    """Raises the fields' error for the first field of a config.json that is not implemented."""
    # A drafter's vocabulary must be the target's, under any of these names.
    vocabulary = dict.fromkeys(("draft_vocab_size", "target_vocab_size"), (fields.data.get("vocab_size"),))
    own = {**_NEUTRAL_OF_DFLASH, **vocabulary} if is_dflash else _NEUTRAL_OF_LANGUAGE_MODELS
    read = _READ | frozenset(family.names.values()) | (_READ_OF_DFLASH if is_dflash else frozenset())
    if family.experts:
        read |= _READ_OF_EXPERTS
    refuse_unknown(fields, read | _BOOKKEEPING, {**_NEUTRAL, **family.neutral, **own})
    if is_dflash:
        neutral = {**_NEUTRAL_OF_SECTION, **vocabulary, "num_target_layers": (fields.data.get("num_target_layers"),)}
        refuse_unknown(fields.section(dflash.SECTION), _READ_OF_SECTION | _BOOKKEEPING_OF_SECTION, neutral)


def refuse_unknown(fields: Fields, known: Collection[str], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises the fields' error for the first entry of one object that is neither known nor one of the values that
    `neutral` allows it."""
    given = {name: value for name, value in fields.data.items() if name not in known and value is not None}
    # Known fields first, in the table's order: their messages say more than those for unknown ones.
    for name in neutral:
        if name in given and not any(_same(given[name], wanted) for wanted in neutral[name]):
            implemented = " or ".join(_json(wanted) for wanted in neutral[name]) or "null"
            raise _not_implemented(fields, name, f"only {implemented} is")
    for name in sorted(given.keys() - neutral.keys()):
        raise _not_implemented(fields, name, "if no number of the model depends on it, remove it from the file")


def _not_implemented(fields: Fields, name: str, hint: str) -> DDTreeError:
    """The error for a field; `hint` replaces the source's advice, since the file may be as it was published."""
    hinted = replace(fields, source=replace(fields.source, advice=hint))
    return hinted.fault(name, f"is {shown(fields.data[name])}, which is not implemented")


def _same(value: Any, wanted: Any) -> bool:
    """Equal as JSON: true is not 1, 1.0 is."""
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)


def _json(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
