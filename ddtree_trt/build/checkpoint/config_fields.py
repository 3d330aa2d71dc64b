"""The fields of config.json that are known; every other one is refused by its name.

Three kinds: fields that are read, bookkeeping that no number of the model depends on, and fields of which only the
values that change nothing are implemented. A field that is null is not set. Those here are a decoder's: names of the
families' configurations in transformers, and of their base class through all versions. `dialects` has the drafters'.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ddtree_trt.build.checkpoint.dialect import Dialect
from ddtree_trt.errors import DDTreeError
from ddtree_trt.models.families import CONFIG_NAMES, EXPERT_NAMES, Family
from ddtree_trt.reading import Fields, shown

_READ = frozenset(CONFIG_NAMES.values()) | frozenset(
    """architectures model_type rope_parameters rope_scaling tie_word_embeddings eos_token_id layer_types
    use_sliding_window sliding_window max_window_layers quantization_config""".split()
)
_READ_OF_EXPERTS = frozenset(("num_local_experts", *EXPERT_NAMES.values()))

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


def refuse_unknown_fields(fields: Fields, family: Family, dialect: Dialect) -> None:
    """Raises the fields' error for the first field of a config.json, whose decoder is of this family, that is not
    implemented."""
    own = dialect.fields
    for name, section in dialect.sections.items():
        if name != dialect.decoder:
            refuse_unknown(fields.section(name), section.read, section.neutral)
    if dialect.decoder is None:
        refuse_unknown(fields, _decoder_names(family) | own.read, {**_decoder_neutral(family), **own.neutral})
        return
    refuse_unknown(fields, _BOOKKEEPING | own.read, own.neutral)
    extra = dialect.sections[dialect.decoder]
    neutral = {**_decoder_neutral(family), **extra.neutral}
    refuse_unknown(fields.section(dialect.decoder), _decoder_names(family) | extra.read, neutral)


def _decoder_names(family: Family) -> frozenset[str]:
    """Fields of a decoder that are read, or that no number depends on."""
    own = frozenset(family.names.values()) | (_READ_OF_EXPERTS if family.experts else frozenset())
    return _READ | _BOOKKEEPING | own


def _decoder_neutral(family: Family) -> dict[str, tuple[Any, ...]]:
    return {**_NEUTRAL, **family.neutral}


def refuse_unknown(fields: Fields, known: Collection[str], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises the fields' error for the first entry of one object that is neither known nor one of the values that
    `neutral` allows it."""
    # Known fields first, in the table's order: their messages say more than those for unknown ones.
    refuse_other_values(fields, {name: values for name, values in neutral.items() if name not in known})
    given = {name for name, value in fields.data.items() if value is not None}
    for name in sorted(given - neutral.keys() - set(known)):
        raise _not_implemented(fields, name, "if no number of the model depends on it, remove it from the file")


def refuse_other_values(fields: Fields, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises the fields' error for the first of these fields that is set to none of its values."""
    for name, values in neutral.items():
        if fields.has(name) and not any(_same(fields.data[name], wanted) for wanted in values):
            implemented = " or ".join(_json(wanted) for wanted in values) or "null"
            raise _not_implemented(fields, name, f"only {implemented} is")


def _not_implemented(fields: Fields, name: str, hint: str) -> DDTreeError:
    """The error for a field; `hint` replaces the source's advice, since the file may be as it was published."""
    hinted = replace(fields, source=replace(fields.source, advice=hint))
    return hinted.fault(name, f"is {shown(fields.data[name])}, which is not implemented")


def _same(value: Any, wanted: Any) -> bool:
    """Equal as JSON: true is not 1, 1.0 is."""
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)


def _json(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
