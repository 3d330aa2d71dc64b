"""Dialects of config.json: how publishers write it and name tensors, which of them a file is, and its known fields.

Every dialect is read into the same records (`models/`, `drafters/`). Those of drafters are in the packages of their
kinds; no other room knows a foreign field of a drafter. A field that is not known is refused by its name.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from ddtree_trt.drafters.registry import KINDS
from ddtree_trt.errors import DDTreeError
from ddtree_trt.models.decoder import LAYERS, TransformerDims
from ddtree_trt.models.families import CONFIG_NAMES, EXPERT_NAMES, FAMILIES, FULL_ATTENTION, LAYER_TYPES, Family
from ddtree_trt.reading import Between, Fields, shown

# The library `speculators` writes the drafter's type, and its decoder in an object of its own.
SPECULATORS_TYPE, SPECULATORS_DECODER = "speculators_model_type", "transformer_layer_config"
TEXT = "text_config"  # the object of a vision-language model's text part
LONGEST_WINDOW = 1 << 30
_FULL, _SLIDING = FULL_ATTENTION, "sliding_attention"

# Field → the values that change nothing; None: it is read, or no number of the model depends on it. A field that is
# null is not set.
Known = Mapping[str, tuple[Any, ...] | None]
# (config.json, dimensions of the decoder that it states, the decoder's family) → dimensions of the network.
ReadDims = Callable[[Fields, TransformerDims, Family], TransformerDims]
# (dimensions as config.json has them, names of the stored tensors) → the dimensions of these tensors.
Settle = Callable[[Any, Collection[str]], TransformerDims]


def words(text: str, values: tuple[Any, ...] | None = None) -> dict[str, tuple[Any, ...] | None]:
    """Fields of these values, or of any, by their names separated by spaces."""
    return dict.fromkeys(text.split(), values)


def known(*tables: Known) -> Known:
    """The fields of all tables; one that may have any value in one of them may have it."""
    every = {name: values for table in tables for name, values in table.items()}
    return every | {name: None for table in tables for name, values in table.items() if values is None}


_BOOKKEEPING = words(
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
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens"""
)
# Of a decoder: those that are read, bookkeeping, and those of which only some values are implemented. Names of the
# families' configurations in transformers, and of their base class through all versions.
_DECODER: Known = {
    **_BOOKKEEPING,
    **dict.fromkeys(CONFIG_NAMES.values()),
    **words("architectures model_type rope_parameters rope_scaling tie_word_embeddings eos_token_id layer_types"),
    **words("use_sliding_window sliding_window max_window_layers quantization_config"),
    "hidden_act": ("silu",),
    "pruned_heads": ({},),
    "mlp_only_layers": ([],),
    **words("cross_attention_hidden_size final_logit_softcapping attn_logit_softcapping", ()),
    **words("num_experts num_local_experts", (0,)),
    **words("partial_rotary_factor output_multiplier logit_scale embedding_multiplier residual_multiplier", (1,)),
    **words(
        """attention_bias mlp_bias rope_interleave rope_interleaved is_encoder_decoder add_cross_attention
        tie_encoder_decoder attention_sink_bias output_router_logits norm_topk_prob use_mrope""",
        (False,),
    ),
}
_EXPERTS = dict.fromkeys(("num_local_experts", *EXPERT_NAMES.values()))


@dataclass(frozen=True)
class Dialect:
    title: str  # in messages: "drafters with a dflash_config"
    fields: Known  # of the file, beside those of a decoder where no object of its own states that
    read_dims: ReadDims
    architectures: tuple[str, ...] = ()  # the classes it has in config.json; () for that of its decoder's family
    mark: str = ""  # the field that tells it from others where the class does not
    speculators: str = ""  # its type, where it is a layout of the library `speculators`
    skipped: str = ""  # what of a model is left out, in words for the user
    sections: Mapping[str, Known] = field(default_factory=dict)  # objects within the file
    settle: Settle = lambda dims, stored: dims
    unused: tuple[str, ...] = ()  # beginnings of the names of tensors that drafting does not need
    renamed: Mapping[str, str] = field(default_factory=dict)  # beginning of a tensor's name → ours in its place

    @property
    def decoder(self) -> str | None:
        """The object that states the decoder; None: the file does."""
        return SPECULATORS_DECODER if self.speculators else TEXT if self.skipped else None

    def our_name(self, name: str) -> str:
        old = next((old for old in self.renamed if name.startswith(old)), "")
        return self.renamed.get(old, "") + name[len(old) :]

    def refuse_unknown(self, fields: Fields, family: Family) -> None:
        """Raises the fields' error for the first field of a config.json, whose decoder is of this family, that is not
        implemented."""
        decoder = known(_DECODER, dict.fromkeys(family.names.values()), _EXPERTS if family.experts else {})
        decoder = known(decoder, family.neutral)
        for name, section in self.sections.items():
            refuse_unknown(fields.section(name), known(decoder, section) if name == self.decoder else section)
        refuse_unknown(fields, known(_BOOKKEEPING if self.decoder else decoder, self.fields))


def refuse_unknown(fields: Fields, table: Known) -> None:
    """Raises the fields' error for the first entry of an object that the table lacks, or has with another value."""
    # Known fields first, in the table's order: their messages say more than those for unknown ones.
    for name, values in table.items():
        given = fields.data.get(name)
        # As JSON: true is not 1, but 1.0 is.
        same = (isinstance(given, bool) == isinstance(value, bool) and given == value for value in values or ())
        if values is not None and given is not None and not any(same):
            implemented = " or ".join(str(v).lower() if isinstance(v, bool) else repr(v) for v in values) or "null"
            raise _not_implemented(fields, name, f"only {implemented} is")
    for name in sorted(name for name in fields.data if fields.has(name) and name not in table):
        raise _not_implemented(fields, name, "if no number of the model depends on it, remove it from the file")


def _not_implemented(fields: Fields, name: str, hint: str) -> DDTreeError:
    """The error for a field; `hint` replaces the source's advice, since the file may be as it was published."""
    return fields.advising(hint).fault(name, f"is {shown(fields.data[name])}, which is not implemented")


# Which dialect a file is


def _language_model_dims(fields: Fields, dims: TransformerDims, family: Family) -> TransformerDims:
    if not family.delta:  # whose kinds of layers are among the dimensions
        refuse_windows(fields, family, dims.num_layers)
    return dims


def _stored_experts(dims: TransformerDims, stored: Collection[str]) -> TransformerDims:
    """As the checkpoint has them: some that were made of others have every expert apart."""
    if dims.experts is None or not dims.experts.stacked or any(n.endswith(".experts.gate_up_proj") for n in stored):
        return dims
    return replace(dims, experts=replace(dims.experts, stacked=False))


# Targets, and drafters that are one.
LANGUAGE_MODEL = Dialect(
    title="other checkpoints",
    fields={"is_causal": (True,), "is_decoder": (True, False)},
    read_dims=_language_model_dims,
    settle=_stored_experts,
    unused=("mtp.",),  # layers that predict several tokens
)
VISION_LANGUAGE = replace(
    LANGUAGE_MODEL,
    title="vision-language models",
    fields=words(
        """architectures model_type tie_word_embeddings eos_token_id quantization_config text_config vision_config
        language_model_only image_token_id video_token_id vision_start_token_id vision_end_token_id"""
    ),
    sections={TEXT: {}},
    skipped="its vision tower",
    unused=(*LANGUAGE_MODEL.unused, "model.visual."),
    renamed={"model.language_model.": "model."},
)


def architectures(fields: Fields) -> list[str]:
    """The classes that the file names; it may leave them out."""
    return fields.optional("architectures", list[str]) or []


def dialect_of(fields: Fields) -> Dialect:
    """By the type of speculators' layout, else by the class, else by the mark. What is none of these is a language
    model, or has one as a part, whose known fields are no other drafter's."""
    kinds = [kind for kind in KINDS.values() if kind.has("dialects")]
    dialects: list[Dialect] = [dialect for kind in kinds for dialect in kind.load("dialects")]
    if fields.has(SPECULATORS_TYPE) or fields.has(SPECULATORS_DECODER):
        types = {dialect.speculators: dialect for dialect in dialects if dialect.speculators}
        if (kind := fields.text(SPECULATORS_TYPE)) not in types:
            problem = f"is {shown(kind)}, which is not implemented; {' and '.join(types)} are"
            raise fields.fault(SPECULATORS_TYPE, problem)
        return types[kind]
    named = set(architectures(fields)) - {family.architecture for family in FAMILIES.values()}
    by_class = [dialect for dialect in dialects if not named.isdisjoint(dialect.architectures)]
    by_mark = [dialect for dialect in dialects if dialect.mark and fields.has(dialect.mark)]
    return next(iter((*by_class, *by_mark, VISION_LANGUAGE if fields.has(TEXT) else LANGUAGE_MODEL)))


def stated(name: str, kind: Any, *places: Fields) -> Any:
    """The value of a field that several objects may have; None where none has it. Raises the fields' error where two
    objects differ."""
    found = [(place, place.value(name, kind)) for place in places if place.has(name)]
    for place, value in found[1:]:
        if value != found[0][1]:
            problem = f"is {shown(found[0][1])}, but {shown(value)} in {place.path or 'the file'}: which is it?"
            raise found[0][0].fault(name, problem)
    return found[0][1] if found else None


def required(name: str, kind: Any, *places: Fields) -> Any:
    """`stated` of a field that must be there."""
    value = stated(name, kind, *places)
    return places[0].value(name, kind) if value is None else value


def sliding_layers(fields: Fields, family: Family, layers: int) -> list[bool]:
    """Per layer whether it sees a window of the sequence only: as listed, else as transformers derives it."""
    switched = family.windowed or fields.flag("use_sliding_window", False)
    # Configurations without a window may write 0 for none.
    within = Between(1 if switched else 0, LONGEST_WINDOW)
    no_window = fields.optional("sliding_window", Annotated[int, within]) is None and "sliding_window" in fields.data
    first = fields.integer("max_window_layers", Between(0, LAYERS.highest), 28)
    kinds = fields.optional(LAYER_TYPES, list[str])
    if kinds is None:
        return [switched and not no_window and (family.windowed or i >= first) for i in range(layers)]
    _check_kinds(fields, kinds, layers, (_FULL, _SLIDING))
    return [kind == _SLIDING or (family.windowed and not no_window) for kind in kinds]


def attention_layers(fields: Fields, layers: int, interval: int, other: str) -> tuple[int, ...]:
    """The layers of full attention, as listed or the last of every `interval`; the others must be of the kind
    `other`."""
    kinds = fields.optional(LAYER_TYPES, list[str])
    if kinds is None:
        return tuple(range(interval - 1, layers, interval))
    _check_kinds(fields, kinds, layers, (other, _FULL))
    return tuple(i for i, kind in enumerate(kinds) if kind == _FULL)


def _check_kinds(fields: Fields, kinds: list[str], layers: int, known: tuple[str, str]) -> None:
    if len(kinds) != layers:
        raise fields.fault(LAYER_TYPES, f"has {len(kinds)} entries for num_hidden_layers {layers}")
    if wrong := [kind for kind in kinds if kind not in known]:
        offered = " and ".join(map(repr, known))
        raise fields.fault(LAYER_TYPES, f"is {shown(wrong[0])}, which is not implemented; {offered} are")


def refuse_windows(fields: Fields, family: Family, layers: int) -> None:
    """Raises the fields' error where a layer of a language model has a window."""
    if not any(sliding_layers(fields, family, layers)):
        return
    if _SLIDING in (fields.data.get("layer_types") or ()):
        raise fields.fault("layer_types", f"is {_SLIDING!r}, which is not implemented: every layer must be {_FULL!r}")
    fields = fields.advising("set it to null for texts of no more tokens than the window, or use another model")
    switch = "sliding_window" if family.windowed else "use_sliding_window"
    found = f"is {shown(fields.data[switch])}" if fields.has(switch) else "is left out, which means a window"
    raise fields.fault(switch, f"{found}: layers with {_SLIDING!r} are not implemented")
